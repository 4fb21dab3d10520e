// What the kinds of group generators share: the FIFOs (the paper's group buffers), call order, pausing and leaving.
// Private to csrc/core: others use group_generator.h. A kind says what a request does that finds its FIFO empty.
#pragma once

#include <deque>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "group_generator.h"
#include "random.h"

namespace torchext::core {

using Deliveries = std::vector<Delivery>;

class GroupGeneratorBase : public GroupGenerator {
 public:
  explicit GroupGeneratorBase(const GeneratorOptions& options);

  Deliveries request(int worker, double now) final;
  Deliveries complete(int worker, std::uint64_t group_id, double now) final;
  Deliveries pause(int worker, double now) final;
  Deliveries leave(int worker, double now) final;
  std::optional<double> nextDeadline() const override { return std::nullopt; }
  Deliveries tick(double /*now*/) override { return {}; }
  std::int64_t requestCount(int worker) const final;

  // For tests and diagnostics: the groups made so far, those that worker has not been told of, and one not completed.
  std::uint64_t lastId() const { return last_id_; }
  const std::deque<std::uint64_t>& pending(int worker) const { return workers_.at(index(worker)).fifo; }
  const Group& group(std::uint64_t group_id) const { return groups_.at(group_id).group; }

 protected:
  // worker waits and has no pending group: form one with it now, or remember it and do so in a later hook.
  virtual void onRequest(int worker, double now, Deliveries& out) = 0;
  // worker has completed a group.
  virtual void onComplete(int /*worker*/, Deliveries& /*out*/) {}
  // worker, which waited for nothing or never will again, is not active any more.
  virtual void onInactive(int /*worker*/, Deliveries& /*out*/) {}

  // Appends a new group to the FIFOs of its members at once, and delivers it to those who wait. The members must be
  // active, and those who wait must have an empty FIFO.
  void formGroup(std::vector<int> members, Deliveries& out);

  // Counts a division; true when it is the turn of a full one (sync_every).
  bool countDivision();
  // The slowdown filter: the largest progress among initiator and the (upper) middle one of workers. The initiator
  // alone is not enough: one slow worker's request would make fast ones wait for another slow one. The foremost would
  // be too much: one worker faster than all others would keep them from meeting each other.
  std::int64_t reference(int initiator, const std::vector<int>& workers) const;
  // worker is so far behind the reference that nobody should wait for it.
  bool filtered(std::int64_t reference, int worker) const;
  // workers without those that are filtered; initiator always stays.
  std::vector<int> withoutFiltered(int initiator, std::vector<int> workers) const;
  // In ascending order.
  std::vector<int> activeWorkers() const;

  bool active(int worker) const { return workers_[index(worker)].active; }
  bool waiting(int worker) const { return workers_[index(worker)].waiting; }
  // Nothing pending and nothing under way: a new group starts as soon as worker asks.
  bool idle(int worker) const;
  int activeCount() const { return active_count_; }
  const GeneratorOptions& options() const { return options_; }
  Random& random() { return random_; }

 private:
  struct Worker {
    bool active = true;
    bool gone = false;
    bool waiting = false;  // a request is unanswered
    std::int64_t requests = 0;
    std::int64_t progress = 0;           // requests, but pauses left out: what the slowdown filter compares
    std::int64_t lag = 0;                // behind the foremost when the pause began
    std::deque<std::uint64_t> fifo;      // groups not yet delivered to this worker
    std::vector<std::uint64_t> running;  // delivered, not completed; several only after a pause
  };
  struct Record {
    Group group;
    int open = 0;       // members that have not completed it
    bool told = false;  // some member knows it: its members must not change any more
  };

  Worker& checkedWorker(const char* call, int worker);
  void deliverHead(int worker, Deliveries& out);
  void deactivate(Worker& worker);
  void release(std::uint64_t group_id);

  GeneratorOptions options_;
  Random random_;
  std::vector<Worker> workers_;
  std::unordered_map<std::uint64_t, Record> groups_;
  std::uint64_t last_id_ = 0;
  std::uint64_t divisions_ = 0;
  std::int64_t foremost_ = 0;  // the largest progress of all
  int active_count_ = 0;
};

std::unique_ptr<GroupGenerator> makeRandomGenerator(const GeneratorOptions& options);
std::unique_ptr<GroupGenerator> makeDivisionGenerator(const GeneratorOptions& options);
std::unique_ptr<GroupGenerator> makeReadySetGenerator(const GeneratorOptions& options);

}  // namespace torchext::core
