// GroupGeneratorBase is what the kinds of group generators share: FIFOs (the paper's group buffers), call order,
// pausing and leaving, and whose turn it is after a meeting. Private to csrc/core: others use group_generator.h. A kind
// says what a request does that finds its FIFO empty.
#pragma once

#include <algorithm>
#include <deque>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/base/check.h"
#include "core/base/random.h"
#include "core/prague/group_generator.h"
#include "core/prague/rejoin_window.h"
#include "core/prague/slowdown_filter.h"

namespace torchext::core {

using Deliveries = std::vector<Delivery>;

class GroupGeneratorBase : public GroupGenerator {
 public:
  explicit GroupGeneratorBase(const GeneratorOptions& options);

  Deliveries request(int worker, double now) final;
  Deliveries complete(int worker, std::uint64_t group_id, double now) final;
  Deliveries pause(int worker, double now) final { return drain("pause", worker, now); }
  Deliveries meet(int worker, double now) final;
  Deliveries leave(int worker, double now) final;
  std::optional<double> nextDeadline() const final {
    return rejoin_window_.deadline() ? rejoin_window_.deadline() : nextOwnDeadline();
  }
  Deliveries tick(double now) final;
  std::int64_t requestCount(int worker) const final;

  // For tests and diagnostics: the groups made so far, those that worker has not been told of, and one not completed.
  std::uint64_t lastId() const { return last_id_; }
  const std::deque<std::uint64_t>& pending(int worker) const { return workers_.at(index(worker)).fifo; }
  const Group& group(std::uint64_t group_id) const { return groups_.at(group_id).group; }

 protected:
  // A worker has asked that has no pending group. Its turn comes now or later.
  virtual void onArrival(double /*now*/) {}
  // Its turn: worker waits and has no pending group. Form one with it now, or remember it and do so in a later hook.
  virtual void onRequest(int worker, double now, Deliveries& out) = 0;
  // worker has completed a group.
  virtual void onComplete(int /*worker*/, Deliveries& /*out*/) {}
  // worker, which waited for nothing or never will again, is not active any more.
  virtual void onInactive(int /*worker*/, Deliveries& /*out*/) {}
  virtual void onTick(double /*now*/, Deliveries& /*out*/) {}
  virtual std::optional<double> nextOwnDeadline() const { return std::nullopt; }

  // Appends a new group to the FIFOs of its members at once, and delivers it to those who wait. The members must be
  // active, and those who wait must have an empty FIFO.
  void formGroup(std::vector<int> members, Deliveries& out);

  // Counts a division; true when it is the turn of a full one (sync_every).
  bool countDivision();
  // workers without those that are filtered; initiator always stays.
  std::vector<int> withoutFiltered(int initiator, std::vector<int> workers) const;
  // In ascending order.
  std::vector<int> activeWorkers() const;

  bool active(int worker) const { return workers_[index(worker)].active; }
  bool waiting(int worker) const { return workers_[index(worker)].waiting; }
  // worker has asked, and its turn is still to come.
  bool queued(int worker) const { return std::find(queue_.begin(), queue_.end(), worker) != queue_.end(); }
  // Nothing pending and nothing under way: a new group starts as soon as worker asks.
  bool idle(int worker) const;
  // Nothing pending, and whatever is under way waits for nobody: idle as soon as the bytes are through.
  bool idleSoon(int worker) const;
  // Seconds since worker was told of the last group that it got.
  double averagingFor(int worker) const { return now_ - workers_[index(worker)].told_at; }
  const SlowdownFilter& filter() const { return filter_; }
  int activeCount() const { return active_count_; }
  const GeneratorOptions& options() const { return options_; }
  Random& random() { return random_; }

 private:
  struct Worker {
    bool active = true;
    bool gone = false;
    bool waiting = false;  // a request is unanswered
    std::int64_t requests = 0;
    double told_at = 0;                  // when the group under way was delivered
    std::deque<std::uint64_t> fifo;      // groups not yet delivered to this worker
    std::vector<std::uint64_t> running;  // delivered, not completed; several only after a pause
  };
  struct Record {
    Group group;
    std::size_t told = 0;  // members that know it: if any, its members must not change any more
    int open = 0;          // members that have not completed it
  };

  Worker& checkedWorker(const char* call, int worker);
  Deliveries drain(const char* call, int worker, double now);
  void admit(Deliveries& out);
  void deliverHead(int worker, Deliveries& out);
  void deactivate(int worker);
  void release(std::uint64_t group_id);

  GeneratorOptions options_;
  Random random_;
  SlowdownFilter filter_;
  RejoinWindow rejoin_window_;
  std::deque<int> queue_;  // those whose turn is still to come, in the order in which they asked
  std::vector<Worker> workers_;
  std::unordered_map<std::uint64_t, Record> groups_;
  std::uint64_t last_id_ = 0;
  std::uint64_t divisions_ = 0;
  int active_count_ = 0;
  double now_ = 0;  // of the call under way
};

std::unique_ptr<GroupGenerator> makeRandomGenerator(const GeneratorOptions& options);
std::unique_ptr<GroupGenerator> makeDivisionGenerator(const GeneratorOptions& options);
std::unique_ptr<GroupGenerator> makeReadySetGenerator(const GeneratorOptions& options);

}  // namespace torchext::core
