#include "core/auto/candidate_simulator.h"

#include <algorithm>
#include <numeric>

#include "core/auto/factor_choice.h"
#include "core/auto/step_samples.h"
#include "core/base/check.h"

namespace torchext::core {
namespace {

bool isDdp(const Candidate& exact) { return exact.way == "ddp"; }
bool isSharded(const Candidate& exact) { return exact.form == "sharded"; }

bool asRows(const Candidate& exact, const Gradient& gradient) {
  return gradient.layer >= 0 &&
         std::binary_search(exact.factor_layers.begin(), exact.factor_layers.end(), gradient.layer);
}

StepProfile ofSlowestRank(const StepProfile& profile, int ranks) {
  checkProfile(profile);
  if (profile.step_samples.empty() || profile.computeSeconds() == 0) {
    return profile;
  }
  return stretched(profile, StepSamples(profile.step_samples).slowest(ranks, ranks) / profile.computeSeconds());
}

// The earlier of two spans; -1 is none.
int earlierUse(int a, int b) { return a < 0 || b < 0 ? std::max(a, b) : std::min(a, b); }

void checkCandidate(const Candidate& candidate, const StepProfile& profile) {
  if (candidate.way != "ddp" && candidate.way != "dear") {
    throwInvalid("way", candidate.way, "ddp, dear");
  }
  for (const auto& bucket : candidate.buckets) {
    if (bucket.empty()) {
      throwInvalid("gradients of a bucket", 0, "1 or more");
    }
    for (const int position : bucket) {
      checkIndex("gradient of a bucket", position, static_cast<int>(profile.gradients.size()));
    }
  }
  for (const int layer : candidate.factor_layers) {
    checkIndex("factor layer", layer, static_cast<int>(profile.layers.size()));
  }
}

}  // namespace

CandidateSimulator::CandidateSimulator(const StepProfile& profile, const LinkModel& link, bool gradient_as_bucket_view)
    : profile_(ofSlowestRank(profile, link.network.ranks)),
      link_(link),
      gradient_as_bucket_view_(gradient_as_bucket_view) {
  checkNetwork(link.network);
}

double CandidateSimulator::copySeconds(std::size_t bytes) const {
  return link_.copy_bytes_per_second > 0 ? static_cast<double>(bytes) / link_.copy_bytes_per_second : 0;
}

bool CandidateSimulator::ddpCopies(const Candidate& exact) const {
  return isDdp(exact) && !gradient_as_bucket_view_ && link_.copy_bytes_per_second > 0;
}

std::vector<Gradient> CandidateSimulator::gradientsOf(const Candidate& exact) const {
  std::vector<Gradient> gradients = profile_.gradients;
  double copying = 0;
  for (Gradient& gradient : gradients) {
    copying += ddpCopies(exact) && !asRows(exact, gradient) ? copySeconds(gradient.bytes) : 0;
    gradient.ready_seconds += copying;
  }
  return gradients;
}

ComputeSpans CandidateSimulator::computeOf(const Candidate& exact) const {
  ComputeSpans compute{profile_.forward_seconds, profile_.backward_seconds, 0};
  if (ddpCopies(exact)) {
    compute.backward_seconds += gradientsOf(exact).back().ready_seconds - profile_.gradients.back().ready_seconds;
  }
  const double second_a_byte =
      profile_.optimizer_seconds / static_cast<double>(std::max<std::size_t>(1, profile_.gradientBytes()));
  for (const Gradient& gradient : profile_.gradients) {
    // Replicated: each parameter is stepped right before it is used. Sharded: a rank steps a slice of what it
    // exchanges.
    const bool deferred = exact.form == "replicated" && gradient.first_use >= 0;
    const int parts = isSharded(exact) && !asRows(exact, gradient) ? link_.network.ranks : 1;
    double& span = deferred ? compute.forward_seconds[index(gradient.first_use)] : compute.optimizer_seconds;
    span += second_a_byte * static_cast<double>(gradient.bytes) / parts;
  }
  for (const int layer : exact.factor_layers) {
    compute.optimizer_seconds += extraFactorSeconds(profile_.layers[index(layer)], link_);
  }
  return compute;
}

double CandidateSimulator::reduceSeconds(const Candidate& exact, std::size_t bytes) const {
  return isDdp(exact) ? link_.all_reduce.seconds(bytes)
                      : copySeconds(bytes) + link_.transport(exact.algorithm).reduce_scatter.seconds(bytes);
}

double CandidateSimulator::gatherSeconds(const Candidate& exact, std::size_t bytes) const {
  return isDdp(exact) ? 0 : link_.transport(exact.algorithm).all_gather.seconds(bytes) + copySeconds(bytes);
}

BucketMessage CandidateSimulator::bucketMessage(const Candidate& exact, const std::vector<Gradient>& gradients,
                                                const std::vector<int>& bucket) const {
  BucketMessage message;
  std::size_t bytes = 0;
  for (const int position : bucket) {
    const Gradient& gradient = gradients[index(position)];
    bytes += gradient.bytes;
    message.ready_seconds = std::max(message.ready_seconds, gradient.ready_seconds);
    message.first_use = earlierUse(message.first_use, gradient.first_use);
  }
  message.reduce_seconds = reduceSeconds(exact, bytes);
  message.unpack_seconds = ddpCopies(exact) ? copySeconds(bytes) : 0;
  message.gathers = !isDdp(exact);
  message.gather_seconds = gatherSeconds(exact, bytes);
  return message;
}

// A layer's gradients are one bucket that goes as rows. Every rank steps all of it, so that nothing is gathered.
BucketMessage CandidateSimulator::rowsMessage(const Candidate& exact, int layer) const {
  std::vector<int> bucket;
  for (std::size_t i = 0; i < profile_.gradients.size(); ++i) {
    if (profile_.gradients[i].layer == layer) {
      bucket.push_back(static_cast<int>(i));
    }
  }
  BucketMessage message = bucketMessage(exact, profile_.gradients, bucket);
  message.reduce_seconds =
      link_.rows ? link_.rows->seconds(static_cast<std::size_t>(rowBytes(profile_.layers[index(layer)]))) : 0;
  message.unpack_seconds = 0;
  message.gathers = false;
  return message;
}

Iteration CandidateSimulator::run(const Candidate& exact, bool with_timeline) const {
  std::vector<BucketMessage> messages;
  const std::vector<Gradient> gradients = gradientsOf(exact);
  for (const auto& bucket : exact.buckets) {
    messages.push_back(bucketMessage(exact, gradients, bucket));
  }
  for (const int layer : exact.factor_layers) {
    messages.push_back(rowsMessage(exact, layer));
  }
  for (std::size_t i = 0; i < messages.size(); ++i) {
    messages[i].item = static_cast<int>(i);
  }
  if (!exact.factor_layers.empty()) {
    std::stable_sort(messages.begin(), messages.end(),
                     [](const BucketMessage& a, const BucketMessage& b) { return a.ready_seconds < b.ready_seconds; });
  }
  return simulateIteration(computeOf(exact), messages, with_timeline);
}

Iteration simulateCandidate(const StepProfile& profile, const LinkModel& link, const Candidate& candidate,
                            bool gradient_as_bucket_view) {
  const CandidateSimulator simulator(profile, link, gradient_as_bucket_view);
  checkCandidate(candidate, profile);
  return simulator.run(candidate, true);
}

}  // namespace torchext::core
