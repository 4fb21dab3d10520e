#include "core/auto/inexact_candidates.h"

#include <algorithm>

#include "core/auto/consensus.h"
#include "core/auto/step_samples.h"
#include "core/base/check.h"

namespace torchext::core {
namespace {

bool isHop(const InexactWay& way) { return way.way == "hop"; }

bool besideCompute(const InexactWay& way) { return way.order == (isHop(way) ? "parallel" : "cta"); }

void checkWay(const InexactWay& way, int ranks) {
  if (way.way != "prague" && way.way != "dssync" && !isHop(way)) {
    throwInvalid("inexact way", way.way, "prague, dssync, hop");
  }
  if (!besideCompute(way) && way.order != (isHop(way) ? "serial" : "atc")) {
    throwInvalid("order", way.order, concat(isHop(way) ? "parallel, serial" : "cta, atc", " for ", way.way));
  }
  const int least = isHop(way) ? 1 : 2;
  const int most = isHop(way) ? ranks - 1 : ranks;
  if (way.partners < least || way.partners > most) {
    throwInvalid("partners", way.partners, concat(least, "..", most, " for ", way.way));
  }
}

// Of forward and backward, of the slowest rank that a rank waits for.
double computeSeconds(const StepProfile& profile, int group, int ranks) {
  return profile.step_samples.empty() ? profile.computeSeconds()
                                      : StepSamples(profile.step_samples).slowest(group, ranks);
}

double averageSeconds(const InexactWay& way, const LinkModel& link, std::size_t bytes) {
  if (isHop(way)) {
    const Link& line = link.network.link;
    return line.latency_seconds + way.partners * static_cast<double>(bytes) / line.bytes_per_second;
  }
  const Network group{way.partners, link.network.link};
  return scaledTable(link.all_reduce, Operation::kAllReduce, Algorithm::kRing, link.network, group).seconds(bytes);
}

Candidate candidateOf(const InexactWay& way, const StepProfile& profile, const LinkModel& link) {
  const int ranks = link.network.ranks;
  checkWay(way, ranks);
  Candidate candidate;
  candidate.way = way.way;
  candidate.form = way.order;
  candidate.partners = way.partners;
  candidate.exact = false;
  candidate.rho = isHop(way) ? way.rho : groupRho(ranks, way.partners);
  candidate.extra_bytes = static_cast<double>(profile.gradientBytes());
  candidate.compute_seconds = computeSeconds(profile, isHop(way) ? 1 : way.partners, ranks) + profile.optimizer_seconds;
  const double average = averageSeconds(way, link, profile.gradientBytes());
  candidate.step_seconds =
      besideCompute(way) ? std::max(candidate.compute_seconds, average) : candidate.compute_seconds + average;
  candidate.exposed_reduce_seconds = candidate.step_seconds - candidate.compute_seconds;
  return candidate;
}

}  // namespace

std::vector<Candidate> inexactCandidates(const StepProfile& profile, const LinkModel& link,
                                         const SearchOptions& options) {
  std::vector<Candidate> candidates;
  for (const InexactWay& way : options.inexact) {
    candidates.push_back(candidateOf(way, profile, link));
    if (const auto refused = options.refused.find(way.way); refused != options.refused.end()) {
      candidates.back().possible = false;
      candidates.back().reason = refused->second;
    }
  }
  return candidates;
}

}  // namespace torchext::core
