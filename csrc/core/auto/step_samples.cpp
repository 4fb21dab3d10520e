#include "core/auto/step_samples.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "core/base/check.h"
#include "core/dear/step_times.h"

namespace torchext::core {
namespace {

using Samples = std::vector<double>;

// The share of samples at most x; samples ascending.
double shareUpTo(const Samples& samples, double x) {
  const auto above = std::upper_bound(samples.begin(), samples.end(), x);
  return static_cast<double>(above - samples.begin()) / static_cast<double>(samples.size());
}

void checkSamples(const std::vector<Samples>& samples) {
  if (samples.empty()) {
    throwInvalid("ranks with step samples", 0, "1 or more");
  }
  for (std::size_t rank = 0; rank < samples.size(); ++rank) {
    if (samples[rank].empty()) {
      throwInvalid("number of step samples", 0, concat("1 or more, of rank ", rank));
    }
    for (const double seconds : samples[rank]) {
      if (!std::isfinite(seconds) || seconds <= 0) {
        throwInvalid("step sample", seconds, concat("finite, above 0; it is of rank ", rank));
      }
    }
  }
}

void append(Samples& to, const Samples& from) { to.insert(to.end(), from.begin(), from.end()); }

}  // namespace

double expectedMaximum(std::vector<double> samples, int draws) {
  checkSamples({samples});
  if (draws < 1) {
    throwInvalid("draws", draws, "1 or more");
  }
  std::sort(samples.begin(), samples.end());
  const auto count = static_cast<double>(samples.size());
  double sum = 0;
  double share_below = 0;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const double share = std::pow(static_cast<double>(i + 1) / count, draws);
    sum += samples[i] * (share - share_below);
    share_below = share;
  }
  return sum;
}

StepSamples::StepSamples(const std::vector<std::vector<double>>& samples) {
  checkSamples(samples);
  Samples all;
  for (const Samples& own : samples) {
    append(all, own);
  }
  const double middle = median(all);
  for (std::size_t rank = 0; rank < samples.size(); ++rank) {
    if (std::abs(median(samples[rank]) - middle) > kApart * middle) {
      apart_ranks_.push_back(static_cast<int>(rank));
      apart_.push_back(samples[rank]);
      std::sort(apart_.back().begin(), apart_.back().end());
    } else {
      append(pool_, samples[rank]);
    }
  }
  if (pool_.empty()) {
    pool_ = all;
  }
  std::sort(pool_.begin(), pool_.end());
  std::stable_sort(apart_.begin(), apart_.end(),
                   [](const Samples& a, const Samples& b) { return median(a) > median(b); });
}

double StepSamples::slowest(int group, int ranks) const {
  if (group < 1 || group > ranks) {
    throwInvalid("group", group, concat("1..", ranks));
  }
  const std::size_t apart = std::min(apart_.size(), index(ranks));
  Samples times = pool_;
  for (std::size_t i = 0; i < apart; ++i) {
    append(times, apart_[i]);
  }
  std::sort(times.begin(), times.end());
  double sum = 0;
  double share_below = 0;
  for (const double x : times) {
    const double share = shareOfGroups(x, group, ranks, apart);
    sum += x * (share - share_below);
    share_below = share;
  }
  return sum;
}

// The probability that no member of a random group takes longer than x.
double StepSamples::shareOfGroups(double x, int group, int ranks, std::size_t apart) const {
  // products[j]: the sum, over all sets of j of the ranks apart, of the product of their shares.
  std::vector<double> products{1};
  for (std::size_t i = 0; i < apart; ++i) {
    const double share = shareUpTo(apart_[i], x);
    products.push_back(0);
    for (std::size_t j = products.size() - 1; j > 0; --j) {
      products[j] += products[j - 1] * share;
    }
  }
  const double pooled = shareUpTo(pool_, x);
  double sum = 0;
  for (std::size_t j = 0; j < products.size(); ++j) {
    // That just those j of the ranks apart are among the members.
    double chance = 1;
    for (std::size_t i = 0; i < apart; ++i) {
      const auto taken = static_cast<double>(i);
      const double places = i < j ? group - taken : ranks - group - (taken - static_cast<double>(j));
      chance *= std::max(0.0, places) / (ranks - taken);
    }
    if (chance > 0) {
      sum += products[j] * chance * std::pow(pooled, group - static_cast<int>(j));
    }
  }
  return sum;
}

}  // namespace torchext::core
