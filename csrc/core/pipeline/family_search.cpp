#include "core/pipeline/family_search.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "core/base/check.h"

namespace torchext::core {
namespace {

// Of actions simulated in one local search, about: partitions asked for are as many as that allows.
constexpr double kMostActions = 5e7;
constexpr double kActionsOfQuestion = 60;  // times p M
constexpr int kFewestQuestions = 300;
constexpr double kBetterDepths = 1e-9;  // relative: the partition is searched once more

bool keepBetter(std::optional<StageOrder>& best, std::optional<StageOrder> found) {
  if (!found || (best && !isBetter(*found, *best))) {
    return false;
  }
  best = std::move(found);
  return true;
}

double bound(const std::optional<StageOrder>& best, double below) {
  return best ? std::min(best->ranked_seconds, below) : below;
}

}  // namespace

FamilySearch::FamilySearch(const StageCosts& costs, const PipelineOptions& options, OrderFamily family, int stages,
                           int data, int microbatches)
    : costs_(costs),
      options_(options),
      family_(family),
      stages_(stages),
      data_(data),
      microbatches_(microbatches),
      exhaustive_(partitionCount(costs.layers(), stages) <= options.most_partitions),
      orders_(costs, options, family, microbatches) {}

std::optional<StageOrder> FamilySearch::best(double memory_bytes, double below, SearchEffort effort) {
  std::optional<StageOrder> best;
  std::vector<StageSizes> seeds;
  if (!last_.empty()) {
    seeds.push_back(last_);
  }
  if (effort == SearchEffort::kFull || last_.empty()) {
    std::ranges::move(seedPartitions(costs_, stages_, microbatches_, family_ == OrderFamily::kZeroBubble),
                      std::back_inserter(seeds));
  }
  seeds.push_back(leastMaximum(costs_.layers(), stages_, [this](int /*stage*/, int first, int last) {
    return costs_.peakBytes(first, last, options_.recompute, 1);
  }));
  for (const StageSizes& seed : seeds) {
    keepBetter(best, orders_.near(seed, memory_bytes, bound(best, below)));
  }
  if (exhaustive_) {
    tryAll(best, memory_bytes, below);
  } else if (best && effort != SearchEffort::kCheck) {
    climb(best, StageSizes(best->sizes), memory_bytes, below);
  }
  if (best) {
    last_ = best->sizes;
  }
  return best;
}

void FamilySearch::climb(std::optional<StageOrder>& best, const StageSizes& start, double memory_bytes, double below) {
  StageSizes sizes = start;
  const double of_question = kActionsOfQuestion * stages_ * microbatches_;
  int left = std::max(kFewestQuestions, static_cast<int>(kMostActions / of_question));
  const auto accept = [&](const StageSizes& moved) {
    --left;
    return keepBetter(best, orders_.near(moved, memory_bytes, bound(best, below)));
  };
  for (bool better = true; better;) {
    improvePartition(sizes, accept, left);
    const double before = best->ranked_seconds;
    keepBetter(best, orders_.best(sizes, memory_bytes, bound(best, below)));
    better = left > 0 && best->ranked_seconds < before * (1 - kBetterDepths);
  }
}

void FamilySearch::tryAll(std::optional<StageOrder>& best, double memory_bytes, double below) {
  if (best) {  // a better start leaves less to try
    climb(best, StageSizes(best->sizes), memory_bytes, below);
  }
  forEachPartition(costs_.layers(), stages_, [&](const StageSizes& sizes) {
    keepBetter(best, orders_.best(sizes, memory_bytes, bound(best, below)));
  });
}

LeastMemory FamilySearch::leastMemory() const {
  const int depth = family_ == OrderFamily::kGPipe ? microbatches_ : 1;
  const bool may_recompute = options_.recompute && family_ != OrderFamily::kZeroBubble;
  const auto peak = [&](int first, int last) {
    const double plain = costs_.peakBytes(first, last, false, depth);
    return may_recompute ? std::min(plain, costs_.peakBytes(first, last, true, depth)) : plain;
  };
  const StageSizes sizes =
      leastMaximum(costs_.layers(), stages_, [&](int /*stage*/, int first, int last) { return peak(first, last); });
  LeastMemory least;
  int first = 0;
  for (int stage = 0; stage < stages_; ++stage) {
    const int last = first + sizes[index(stage)] - 1;
    if (stage == 0 || peak(first, last) > least.bytes) {
      least = {peak(first, last), stage, first, last};
    }
    first = last + 1;
  }
  return least;
}

std::string FamilySearch::shape() const { return shapeName(stages_, data_); }

std::string shapeName(int stages, int data) {
  return concat(stages, stages == 1 ? " stage" : " stages", data == 1 ? std::string() : concat(" x ", data));
}

}  // namespace torchext::core
