#include "core/pipeline/depth_search.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/base/check.h"

namespace torchext::core {
namespace {

constexpr double kSame = 1e-12;  // relative; less is rounding
constexpr double kNear = 1.03;   // seeds that far above are not climbed from
constexpr std::array<int, 4> kDepthSteps{1, 2, -1, -2};
// Pairs of stages are close to each other where there are many: O(p) of them, not O(p^2).
constexpr std::size_t kManyStages = 12;
constexpr std::size_t kPairDistance = 3;
// Of actions simulated for one question: far more than small cases take, an end for large ones.
constexpr double kMostActionsBest = 3e8;
constexpr double kMostActionsNear = 4e6;

// p - j, 2 (p - j) - 1, and all.
std::vector<std::vector<int>> depthSeeds(int stages, int microbatches) {
  std::vector<std::vector<int>> seeds(3);
  for (int stage = 0; stage < stages; ++stage) {
    seeds[0].push_back(stages - stage);
    seeds[1].push_back(2 * (stages - stage) - 1);
    seeds[2].push_back(microbatches);
  }
  return seeds;
}

}  // namespace

DepthChoice DepthSearch::best(const std::vector<StageTimes>& stages, std::vector<int> limits) {
  begin(stages, std::move(limits), kMostActionsBest / 3);
  if (limits_.back() < 1) {
    return {};
  }
  const double left = left_;
  DepthChoice best;
  for (auto& seed : depthSeeds(static_cast<int>(stages.size()), microbatches())) {
    now_ = evaluated(std::move(seed));
    left_ = left;
    climb(true);
    if (best.depths.empty() || now_.seconds < best.seconds * (1 - kSame)) {
      best = now_;
    }
    if (atBound()) {
      break;
    }
  }
  now_ = std::move(best);
  shrink();
  last_ = now_.depths;
  return now_;
}

DepthChoice DepthSearch::near(const std::vector<StageTimes>& stages, std::vector<int> limits, double below) {
  begin(stages, std::move(limits), kMostActionsNear);
  if (limits_.back() < 1) {
    return {};
  }
  auto seeds = depthSeeds(static_cast<int>(stages.size()), microbatches());
  if (last_.size() == stages.size()) {
    seeds.push_back(last_);
  }
  now_ = {};
  for (auto& seed : seeds) {
    DepthChoice choice = evaluated(std::move(seed));
    if (now_.depths.empty() || choice.seconds < now_.seconds) {
      now_ = std::move(choice);
    }
  }
  if (now_.seconds > below * kNear) {
    return {};
  }
  climb(false);
  last_ = now_.seconds < below ? now_.depths : last_;
  return now_.seconds < below ? now_ : DepthChoice();
}

void DepthSearch::begin(const std::vector<StageTimes>& stages, std::vector<int> limits, double most_actions) {
  stages_ = &stages;
  limits_ = std::move(limits);
  for (std::size_t j = 0; j < limits_.size(); ++j) {
    limits_[j] = std::min(limits_[j], j == 0 ? microbatches() : limits_[j - 1]);
  }
  least_ = leastSeconds(stages, microbatches(), false);
  left_ = most_actions / (2.0 * static_cast<double>(stages.size()) * microbatches());
}

DepthChoice DepthSearch::evaluated(std::vector<int> depths) {
  for (std::size_t j = 0; j < depths.size(); ++j) {
    depths[j] = std::clamp(depths[j], 1, j == 0 ? limits_[j] : std::min(limits_[j], depths[j - 1]));
  }
  const double seconds = simulator_.seconds(*stages_, depths);
  return {std::move(depths), seconds};
}

void DepthSearch::climb(bool pairs) {
  while (!atBound() && (moveOne() || (pairs && moveTwo()))) {
  }
}

bool DepthSearch::atBound() const { return now_.seconds <= least_ * (1 + kSame); }

bool DepthSearch::allowed(const std::vector<int>& depths) const {
  for (std::size_t j = 0; j < depths.size(); ++j) {
    if (depths[j] < 1 || depths[j] > limits_[j] || (j > 0 && depths[j] > depths[j - 1])) {
      return false;
    }
  }
  return true;
}

bool DepthSearch::offer(const std::vector<int>& depths) {
  if (left_ <= 0 || !allowed(depths)) {
    return false;
  }
  --left_;
  const double seconds = simulator_.seconds(*stages_, depths);
  if (seconds >= now_.seconds * (1 - kSame)) {
    return false;
  }
  now_ = {depths, seconds};
  return true;
}

bool DepthSearch::moveOne() {
  bool better = false;
  for (std::size_t j = 0; j < limits_.size(); ++j) {
    for (const int step : kDepthSteps) {
      moved_ = now_.depths;
      moved_[j] += step;
      better |= offer(moved_);
    }
  }
  return better;
}

bool DepthSearch::moveTwo() {
  const std::size_t count = limits_.size();
  for (std::size_t j = 0; j < count; ++j) {
    const std::size_t end = count > kManyStages ? std::min(count, j + kPairDistance + 1) : count;
    for (std::size_t k = j + 1; k < end; ++k) {
      for (const int step : kDepthSteps) {
        for (const int other : kDepthSteps) {
          moved_ = now_.depths;
          moved_[j] += step;
          moved_[k] += other;
          if (offer(moved_)) {
            return true;
          }
        }
      }
    }
  }
  return false;
}

bool DepthSearch::lowered(std::size_t stage) {
  moved_ = now_.depths;
  --moved_[stage];
  if (!allowed(moved_)) {
    return false;
  }
  const double seconds = simulator_.seconds(*stages_, moved_);
  if (seconds > now_.seconds * (1 + kSame)) {
    return false;
  }
  now_ = {moved_, seconds};
  return true;
}

// The last stages first, for those before them hold no fewer.
void DepthSearch::shrink() {
  for (bool smaller = true; smaller;) {
    smaller = false;
    for (std::size_t j = limits_.size(); j-- > 0;) {
      while (lowered(j)) {
        smaller = true;
      }
    }
  }
}

}  // namespace torchext::core
