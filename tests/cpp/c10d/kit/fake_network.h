// FakeNetwork carries messages and collectives between ranks that are threads of one process.
//
// It stands for the sockets of Gloo, whose headers the wheel of torch does not ship. Of Gloo's manners it keeps those
// that csrc/c10d counts on:
//   * Messages of one source, destination and tag match in the order posted. A send is over once its receive is there.
//   * A receive may be longer than the message that arrives, never shorter. What is not written stays as it was.
//   * A wait that times out closes all connections of its rank.
//   * A message whose work has gone while it was pending jams its pair: nothing of its kind passes any more.
//   * Messages complete inside wait(), which abort() ends with false. Collectives complete by a future, on a thread of
//     their rank.
//
// And it lets a test do what no network does on request: kill a rank at its n-th message, or freeze it.
//
// Threads: everything from any thread. Backends hold their network; it holds none of them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace torchext::kit {

class FakeNetwork : public std::enable_shared_from_this<FakeNetwork> {
 public:
  // timeout: of waits without one of their own, as the timeout with which Gloo's group connected.
  explicit FakeNetwork(int size, std::chrono::milliseconds timeout = std::chrono::seconds(60))
      : size_(size), timeout_(timeout) {}

  // The backend of one rank. When it goes, its connections close.
  c10::intrusive_ptr<c10d::Backend> connect(int rank);

  // Closes all connections of a rank, as its end does.
  void close(int rank);
  // From now on nothing that a rank posts goes out, and nothing reaches it; no connection closes.
  void freeze(int rank);
  // What waits because of that goes on.
  void thaw(int rank);
  // Called once, without locks, when a rank has posted so many sends (or has got so many messages) since the call. The
  // message that counts last is not delivered (or has been).
  void afterSends(int rank, int count, std::function<void()> event);
  void afterReceives(int rank, int count, std::function<void()> event);

  // Messages that a rank has posted to send.
  int sends(int rank) const;
  // Messages and collectives that wait for their other side.
  std::size_t pending() const;
  // Whether a message met one that had been given up.
  bool jammed() const;
  // Collectives in which ranks met with different calls, as Gloo would have let them.
  int mixedCalls() const;

 private:
  friend class FakeBackend;
  friend class MessageWork;

  enum class State : std::uint8_t { kPending, kDone, kClosed };
  struct Message {
    at::Tensor tensor;
    int source;  // -1: any
    int destination;
    int tag;
    bool sends;
    State state = State::kPending;
    bool aborted = false;
    bool gone = false;
    int arrived_from = -1;
    std::string error;
    std::condition_variable changed;
  };
  using MessagePtr = std::shared_ptr<Message>;
  struct Box {  // of a destination and a tag
    std::deque<MessagePtr> sends;
    std::deque<MessagePtr> receives;
  };
  struct Entry {  // of one rank in a collective
    std::string call;
    std::vector<at::Tensor> tensors;
    std::vector<at::Tensor> outputs;
    std::function<void(const std::string& error)> complete;
  };
  struct Trigger {
    int left = 0;
    std::function<void()> event;
  };

  void post(const MessagePtr& message);
  void match(Box& box);                           // with the mutex held
  void deliver(Message& send, Message& receive);  // with the mutex held
  void forget(const MessagePtr& message);
  bool wait(Message& message, std::chrono::milliseconds timeout);
  void enter(int rank, std::uint64_t number, Entry entry);
  void complete(std::uint64_t number);  // if all ranks have entered it
  bool cut(int rank) const { return frozen_.contains(rank); }
  static void count(std::map<int, Trigger>& triggers, int rank, std::vector<std::function<void()>>& events);

  const int size_;
  const std::chrono::milliseconds timeout_;
  mutable std::mutex mutex_;  // guards what follows
  std::map<std::pair<int, int>, Box> boxes_;
  std::map<std::uint64_t, std::map<int, Entry>> calls_;  // by number
  std::set<int> closed_;
  std::set<int> frozen_;
  std::set<std::pair<int, int>> jammed_;  // source and destination
  std::map<int, int> sends_;
  std::map<int, Trigger> on_send_;
  std::map<int, Trigger> on_receive_;
  std::vector<std::function<void()>> received_;  // events to run once the mutex is free
  int mixed_ = 0;
};

}  // namespace torchext::kit
