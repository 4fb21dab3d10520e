// Kinds "division", "inter-intra" and "smart": a request that finds its FIFO empty divides all idle workers.
//
// Where the idle ones do not make full groups, some that are still averaging fill them up: members of one group end at
// the same time, but are heard of one after the other, and whoever asked first would otherwise go on alone, or three in
// a group of three, out of step with everybody (a quarter of all steps where averages take as long as the compute they
// hide under). Not those whose group waits for a member: it may be a slow one.
//
// A worker that would be alone because it is ahead of everybody is held until somebody else asks: the filter excuses
// the others from waiting for the slow, and without this nothing would keep the fastest from training for itself, ever
// further ahead, where steps are short and their times vary.
#include <algorithm>

#include "core/base/host_map.h"
#include "core/prague/group_generator_base.h"

namespace torchext::core {
namespace {

// Less would make others wait, more would make the same ones meet again and again.
constexpr double kAboutAsLong = 0.5;

class DivisionGenerator final : public GroupGeneratorBase {
 public:
  explicit DivisionGenerator(const GeneratorOptions& options)
      : GroupGeneratorBase(options),
        by_rack_(options.kind == GeneratorKind::kSmart && !options.rack_of.empty()),
        areas_(HostMap::fromHostOf(by_rack_ ? options.rack_of : options.host_of, options.world_size)),
        two_rounds_(options.kind != GeneratorKind::kDivision && areas_.hostCount() > 1 &&
                    areas_.hostCount() < options.world_size),
        next_head_(index(areas_.hostCount()), 0) {}

 private:
  void onRequest(int worker, double /*now*/, Deliveries& out) override {
    if (countDivision()) {
      formGroup(withoutFiltered(worker, activeWorkers()), out);
      return;
    }
    std::vector<int> free = activeWorkersThat([this](int other) { return idle(other); });
    const auto limit = filter().reference(worker, free);
    std::vector<int> candidates = withoutFiltered(worker, std::move(free));
    if (candidates.size() == 1 || !two_rounds_) {
      addThoseStillAveraging(worker, candidates);
    }
    if (candidates.size() == 1 && filter().foremostBy(worker, activeWorkers())) {
      if (allHeld(worker)) {
        releaseHeld(worker, out);
      }
      return;  // held: it stays idle, and the next division of anybody takes it
    }
    if (two_rounds_) {
      divideInTwoRounds(candidates, limit, out);
    } else {
      divide(candidates, out);
    }
  }

  // As many as make the groups of a division full: any of those that have averaged for about as long as the longest,
  // and where they do not suffice those that come next. Who has just begun would keep the others waiting for all of it.
  void addThoseStillAveraging(int worker, std::vector<int>& candidates) {
    const std::size_t size = index(options().group_size);
    const std::size_t missing = (size - candidates.size() % size) % size;
    if (missing == 0) {
      return;
    }
    std::vector<int> others =
        withoutFiltered(worker, activeWorkersThat([this](int other) { return !idle(other) && idleSoon(other); }));
    if (others.size() > missing) {
      random().shuffle(others);
      const auto longer = [this](int a, int b) { return averagingFor(a) > averagingFor(b); };
      const double longest = averagingFor(*std::min_element(others.begin(), others.end(), longer));
      const auto later = std::stable_partition(
          others.begin(), others.end(), [&](int other) { return averagingFor(other) >= kAboutAsLong * longest; });
      std::sort(later, others.end(), longer);
      others.resize(missing);
    }
    candidates.insert(candidates.end(), others.begin(), others.end());
  }

  template <class Predicate>
  std::vector<int> activeWorkersThat(const Predicate& holds) const {
    std::vector<int> workers = activeWorkers();
    std::erase_if(workers, [&](int worker) { return !holds(worker); });
    return workers;
  }

  // Somebody is gone: those that are held may have nobody left to wait for.
  void onInactive(int /*worker*/, Deliveries& out) override {
    if (allHeld(-1)) {
      releaseHeld(-1, out);
    }
  }

  // All active workers but `except` wait with nothing pending, and have had their turn: none of them will ask again
  // before it gets a group.
  bool allHeld(int except) const {
    const std::vector<int> workers = activeWorkers();
    return std::all_of(workers.begin(), workers.end(), [&](int worker) {
      return worker == except || (waiting(worker) && pending(worker).empty() && !queued(worker));
    });
  }

  // Lets the held workers go on alone, so that they ask again.
  void releaseHeld(int except, Deliveries& out) {
    for (const int worker : activeWorkers()) {
      if (worker != except) {
        formGroup({worker}, out);
      }
    }
  }

  // Random disjoint groups of about group_size. The remainder is spread, never left alone: whoever averages with nobody
  // has waited for nothing, and one group of 3 and one of 4 cost less than a 4, a 2 and a 1.
  void divide(std::vector<int> workers, Deliveries& out) {
    const std::size_t size = index(options().group_size);
    const std::size_t count = workers.size();
    const std::size_t most = size == 1 ? count : std::max<std::size_t>(1, count / 2);
    const std::size_t groups = std::clamp<std::size_t>((count + size / 2) / size, 1, most);
    random().shuffle(workers);
    for (std::size_t group = 0; group < groups; ++group) {
      const auto begin = workers.begin() + static_cast<std::ptrdiff_t>(group * count / groups);
      const auto end = workers.begin() + static_cast<std::ptrdiff_t>((group + 1) * count / groups);
      formGroup(std::vector<int>(begin, end), out);
    }
  }

  // Of workers of one host or rack. What a group of a whole host costs stays inside the host; a rack is larger.
  void formInside(std::vector<int> workers, Deliveries& out) {
    if (by_rack_) {
      divide(std::move(workers), out);
    } else {
      formGroup(std::move(workers), out);
    }
  }

  void divideInTwoRounds(const std::vector<int>& candidates, const SlowdownFilter::Reference& limit, Deliveries& out) {
    std::vector<std::vector<int>> areas(next_head_.size());
    for (const int worker : candidates) {
      areas[index(areas_.hostOf(worker))].push_back(worker);
    }
    const auto used = std::count_if(areas.begin(), areas.end(), [](const auto& area) { return !area.empty(); });
    if (used == 1) {
      divide(candidates, out);
      return;
    }
    std::vector<int> heads;
    for (std::size_t area = 0; area < areas.size(); ++area) {
      if (areas[area].empty()) {
        continue;
      }
      const int head = takeHead(area, areas[area]);
      heads.push_back(head);
      std::vector<int> others;
      std::copy_if(areas[area].begin(), areas[area].end(), std::back_inserter(others),
                   [head](int worker) { return worker != head; });
      if (!others.empty()) {
        formInside(std::move(others), out);
      }
    }
    divide(std::move(heads), out);
    for (auto& area : areas) {
      // A slow worker that asked is in the first round, where it waits for others; in the second they would for it.
      area.erase(std::remove_if(area.begin(), area.end(), [&](int worker) { return filter().late(limit, worker); }),
                 area.end());
      if (area.size() > 1) {
        formInside(std::move(area), out);
      }
    }
  }

  // The first idle worker of the area from the turn on, by local rank; the turn passes to the one after it.
  int takeHead(std::size_t area, const std::vector<int>& workers) {
    const auto found = std::find_if(workers.begin(), workers.end(),
                                    [&](int worker) { return areas_.localRank(worker) >= next_head_[area]; });
    const int head = found == workers.end() ? workers.front() : *found;
    next_head_[area] = areas_.localRank(head) + 1;
    return head;
  }

  bool by_rack_;
  HostMap areas_;  // the racks where they are known, else the hosts
  bool two_rounds_;
  std::vector<int> next_head_;  // of an area: the local rank whose turn it is
};

}  // namespace

std::unique_ptr<GroupGenerator> makeDivisionGenerator(const GeneratorOptions& options) {
  return std::make_unique<DivisionGenerator>(options);
}

}  // namespace torchext::core
