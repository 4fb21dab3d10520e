// FakeCommunicator exchanges between ranks that are threads of one process, without a group.
//
// It has the three manners of the real ones: messages, memory of a host, a device's groups of messages. A rank dies at
// its n-th call, or the job is aborted; every wait that needs the dead rank then throws, as a group's does.
//
// Threads: one rank a thread; Meeting from any.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "kfac/comm/communicator.h"

namespace torchext::kit {

// Where the ranks of one job meet.
class Meeting : public std::enable_shared_from_this<Meeting> {
 public:
  explicit Meeting(int size) : size_(size) {}

  int size() const { return size_; }
  // A rank's call number `calls` from now throws, and the rank is gone.
  void dieAt(int rank, int calls);
  // All waits end, now and from now on.
  void abort();

 private:
  friend class FakeCommunicator;
  struct Call {
    std::map<int, at::Tensor> from;
  };
  using Box = std::tuple<int, int, int>;  // from, to, tag

  // What a call of the rank begins with.
  void enter(int rank);
  void post(Box box, const at::Tensor& message);
  void fetch(const Box& box, const at::Tensor& into);
  // A collective: its own tensor in, what `make` makes of all ranks' out.
  std::uint64_t join(int rank, const at::Tensor& own);
  at::Tensor complete(std::uint64_t number, const std::function<at::Tensor(const std::map<int, at::Tensor>&)>& make);
  void checkAlive(const std::function<bool(int)>& needs) const;  // with the mutex held

  const int size_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::map<Box, std::deque<at::Tensor>> boxes_;
  std::map<std::uint64_t, Call> calls_;
  std::map<int, std::uint64_t> next_;  // [rank] number of its next collective
  std::map<int, int> left_;            // [rank] calls until it dies
  std::set<int> gone_;
  bool aborted_ = false;
};

enum class Way { kMessages, kMemory, kDevice };

class FakeCommunicator final : public Communicator {
 public:
  FakeCommunicator(std::shared_ptr<Meeting> meeting, int rank, Way way);

  Sum allReduce(at::Tensor slice) override;
  Sum reduce(at::Tensor slice, int root, int tag, const at::Tensor& shares) override;
  Work broadcast(at::Tensor slice, int root) override;
  Work send(at::Tensor slice, int to, int tag) override;
  Work receive(at::Tensor slice, int from, int tag) override;
  void sumAtOnce(const at::Tensor& data, const std::vector<core::Span>& spans) override;
  void bring(Parcels parcels) override;
  void agree(const AgreementFields& fields) override;
  double mean(double value) override;
  std::vector<double> fromRankZero(const std::vector<double>& values) override;
  void measure(at::Device device, std::size_t most, core::KfacCosts& costs) override;
  std::function<void()> watch() const override;

  // What measure() finds.
  static constexpr core::AlphaBeta kAllReduce{2e-4, 3e-9};
  static constexpr core::AlphaBeta kBroadcast{1e-4, 2e-9};

 private:
  void copyParts(const std::vector<at::Tensor>& parts);

  const std::shared_ptr<Meeting> meeting_;
  const Way way_;
};

}  // namespace torchext::kit
