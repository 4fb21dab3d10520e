#include "core/auto/strategy_search.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <tuple>
#include <utility>

#include "core/auto/exact_candidates.h"
#include "core/auto/inexact_candidates.h"
#include "core/base/check.h"

namespace torchext::core {
namespace {

using Candidates = std::vector<Candidate>;

bool isReference(const Candidate& candidate) { return candidate.way == "ddp" && candidate.form == "default"; }

// The reference's step if its all-reduce had been measured too slow by the spread. Noise of the links moves a step by
// their part in it alone, and so is counted there.
double doubtedStep(const Candidate& reference, const StepProfile& profile, const LinkModel& link,
                   const SearchOptions& options) {
  std::vector<CostPoint> points = link.all_reduce.points();
  for (CostPoint& point : points) {
    point.seconds /= 1 + options.spread;
  }
  LinkModel faster = link;
  faster.all_reduce = CostTable(std::move(points));
  return CandidateSimulator(profile, faster, options.gradient_as_bucket_view).run(reference).step_seconds;
}

// The first of the candidates in question, which are in the order of their steps; the reference where none is enough
// faster.
Candidates::iterator choice(Candidates& candidates, const StepProfile& profile, const LinkModel& link,
                            const SearchOptions& options) {
  const bool exact = options.choose == "exact";
  const auto best = std::find_if(candidates.begin(), candidates.end(), [&](const Candidate& candidate) {
    return candidate.possible && (exact ? candidate.exact : !candidate.exact && candidate.way == options.choose);
  });
  if (best == candidates.end()) {
    throwInvalid("choose", options.choose, "exact, or the way of an inexact candidate that is possible");
  }
  const auto reference = std::find_if(candidates.begin(), candidates.end(), isReference);
  const bool stays = exact && best->step_seconds * (1 + kLeastGain) >= doubtedStep(*reference, profile, link, options);
  return stays ? reference : best;
}

std::string whyNot(const Candidate& candidate, const Candidate& chosen, const SearchOptions& options) {
  if (!candidate.possible) {
    return candidate.reason;
  }
  if (!candidate.exact && options.choose != candidate.way) {
    return concat("inexact, and choose is \"", options.choose, "\"");
  }
  if (candidate.exact && !chosen.exact) {
    return concat("choose is \"", options.choose, "\"");
  }
  if (candidate.step_seconds >= chosen.step_seconds) {
    return concat("slower", isReference(candidate) ? "; the reference" : "");
  }
  return concat("less than ", 100 * kLeastGain, " % faster than the reference",
                options.spread > 0
                    ? concat(", were that one's all-reduce ", std::lround(100 * options.spread), " % faster")
                    : "");
}

void checkOptions(const SearchOptions& options, const LinkModel& link) {
  if (link.network.ranks < 2) {
    throwInvalid("ranks", link.network.ranks, "2 or more");
  }
  if (!std::isfinite(options.spread) || options.spread < 0) {
    throwInvalid("spread", options.spread, "finite, 0 or more");
  }
  if (!std::isfinite(options.spare_bytes) || options.spare_bytes < 0) {
    throwInvalid("spare_bytes", options.spare_bytes, "finite, 0 or more");
  }
}

}  // namespace

std::vector<Candidate> searchStrategies(const StepProfile& profile, const LinkModel& link,
                                        const SearchOptions& options) {
  checkOptions(options, link);
  Candidates candidates = exactCandidates(profile, link, options);
  std::ranges::move(inexactCandidates(profile, link, options), std::back_inserter(candidates));
  std::stable_sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return std::tuple(!a.exact, !a.possible, a.step_seconds) < std::tuple(!b.exact, !b.possible, b.step_seconds);
  });
  const auto chosen = choice(candidates, profile, link, options);
  for (Candidate& candidate : candidates) {
    candidate.reason = whyNot(candidate, *chosen, options);
  }
  chosen->chosen = true;
  chosen->reason = "chosen";
  return candidates;
}

}  // namespace torchext::core
