// Kind "random": a group around every worker that asks, once none of its members is locked.
//
// A worker is locked while a group of it is pending or under way; no lock is stored, the FIFOs say it. No deadlock: a
// draw that waits holds no lock, and every member of a formed group either computes or has been delivered the group.
#include <algorithm>
#include <utility>

#include "core/prague/group_generator_base.h"

namespace torchext::core {
namespace {

class RandomGenerator final : public GroupGeneratorBase {
 public:
  using GroupGeneratorBase::GroupGeneratorBase;

 private:
  struct Draw {
    int initiator;
    std::vector<int> members;
    bool full;  // the turn of sync_every: nobody may overtake it, or it would wait for ever
  };

  void onRequest(int worker, double /*now*/, Deliveries& out) override {
    const bool full = countDivision() || std::exchange(full_owed_, false);
    draws_.push_back(Draw{worker, full ? activeWorkers() : draw(worker), full});
    formReady(out);
  }

  void onComplete(int /*worker*/, Deliveries& out) override { formReady(out); }

  void onInactive(int worker, Deliveries& out) override {
    for (auto& waiting_draw : draws_) {
      auto& members = waiting_draw.members;
      const auto found = std::find(members.begin(), members.end(), worker);
      if (found == members.end()) {
        continue;
      }
      if (waiting_draw.full) {
        members.erase(found);
      } else if (waiting_draw.initiator != worker) {
        members = draw(waiting_draw.initiator);
      }
    }
    formReady(out);
  }

  std::vector<int> draw(int initiator) {
    std::vector<int> others = activeWorkers();
    others.erase(std::find(others.begin(), others.end(), initiator));
    const std::size_t taken = std::min(others.size(), index(options().group_size - 1));
    random().sample(others, taken);
    others.resize(taken);
    others.push_back(initiator);
    return others;
  }

  // Oldest draw first. Draws whose worker got another group meanwhile are dropped; a full one is owed then.
  void formReady(Deliveries& out) {
    std::vector<bool> reserved(index(options().world_size), false);
    std::vector<Draw> kept;
    kept.reserve(draws_.size());
    for (auto& candidate : draws_) {
      if (!waiting(candidate.initiator)) {
        full_owed_ = full_owed_ || candidate.full;
        continue;
      }
      const bool ready = std::all_of(candidate.members.begin(), candidate.members.end(),
                                     [&](int member) { return idle(member) && !reserved[index(member)]; });
      if (ready) {
        formGroup(std::move(candidate.members), out);
        continue;
      }
      if (candidate.full) {
        for (const int member : candidate.members) {
          reserved[index(member)] = true;
        }
      }
      kept.push_back(std::move(candidate));
    }
    draws_ = std::move(kept);
  }

  std::vector<Draw> draws_;
  bool full_owed_ = false;
};

}  // namespace

std::unique_ptr<GroupGenerator> makeRandomGenerator(const GeneratorOptions& options) {
  return std::make_unique<RandomGenerator>(options);
}

}  // namespace torchext::core
