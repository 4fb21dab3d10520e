// Kind "ready-set": whoever arrived while the slot was open is the group.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/prague/group_generator_base.h"

namespace torchext::core {
namespace {

// Gaps that the deadline is computed from: a few rounds of a small world, bounded for the sake of a large one.
constexpr std::size_t kMostGaps = 256;
constexpr double kNever = std::numeric_limits<double>::infinity();

// Reorders values; the upper median of an even number.
double upperMedian(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

class ReadySetGenerator final : public GroupGeneratorBase {
 public:
  explicit ReadySetGenerator(const GeneratorOptions& options)
      : GroupGeneratorBase(options),
        gaps_kept_(std::clamp<std::size_t>(4 * index(options.world_size), 16, kMostGaps)) {}

 private:
  std::optional<double> nextOwnDeadline() const override {
    // One worker alone waits for a second: a group of one would isolate exactly the worker that is out of step.
    return slot_.size() < 2 || deadline_ == kNever ? std::nullopt : std::optional<double>(deadline_);
  }

  // Not when its turn comes: those that waited for others have theirs at once.
  void onArrival(double now) override {
    if (last_arrival_) {
      gaps_.push_back(std::max(0.0, now - *last_arrival_));
      if (gaps_.size() > gaps_kept_) {
        gaps_.pop_front();
      }
    }
    last_arrival_ = now;
  }

  void onRequest(int worker, double now, Deliveries& out) override {
    if (slot_.size() >= 2 && now > deadline_) {
      close(out);  // tick is late: this worker did not make it
    }
    if (!waiting(worker)) {
      return;  // what was closed was the turn of a full group
    }
    if (slot_.empty()) {
      deadline_ = now + patience();
    }
    slot_.push_back(worker);
    closeIfFull(out);
    if (slot_.size() >= 2 && now > deadline_) {
      close(out);
    }
  }

  void onTick(double now, Deliveries& out) override {
    if (slot_.size() >= 2 && now >= deadline_) {
      close(out);
    }
  }

  void onInactive(int worker, Deliveries& out) override {
    slot_.erase(std::remove(slot_.begin(), slot_.end(), worker), slot_.end());
    closeIfFull(out);
  }

  void closeIfFull(Deliveries& out) {
    if (!slot_.empty() && slot_.size() >= index(std::min(options().group_size, activeCount()))) {
      close(out);
    }
  }

  void close(Deliveries& out) {
    std::vector<int> members = std::move(slot_);
    slot_.clear();
    if (countDivision()) {
      // Those who arrived belong to it however far behind they are: they wait already.
      std::vector<int> all = withoutFiltered(members.front(), activeWorkers());
      all.insert(all.end(), members.begin(), members.end());
      std::sort(all.begin(), all.end());
      all.erase(std::unique(all.begin(), all.end()), all.end());
      members = std::move(all);
    }
    formGroup(std::move(members), out);
  }

  // How long a slot stays open: group_size - 1 further arrivals, each after a usual gap and some.
  double patience() const {
    if (gaps_.size() < index(options().world_size) && gaps_.size() < gaps_kept_) {
      return kNever;
    }
    std::vector<double> values(gaps_.begin(), gaps_.end());
    const double usual = upperMedian(values);
    for (auto& value : values) {
      value = std::abs(value - usual);
    }
    return (options().group_size - 1) * (usual + options().deadline_factor * upperMedian(values));
  }

  std::vector<int> slot_;  // in the order of arrival
  double deadline_ = kNever;
  std::deque<double> gaps_;
  std::size_t gaps_kept_;
  std::optional<double> last_arrival_;
};

}  // namespace

std::unique_ptr<GroupGenerator> makeReadySetGenerator(const GeneratorOptions& options) {
  return std::make_unique<ReadySetGenerator>(options);
}

}  // namespace torchext::core
