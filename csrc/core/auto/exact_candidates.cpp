#include "core/auto/exact_candidates.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>

#include "core/auto/factor_choice.h"
#include "core/auto/partition_search.h"
#include "core/base/check.h"

namespace torchext::core {
namespace {

constexpr int kMostRecuts = 8;  // of a candidate's trials: the program takes L^2

Candidate named(const char* way, const char* form) {
  Candidate candidate;
  candidate.way = way;
  candidate.form = form;
  return candidate;
}

Candidate impossible(Candidate candidate, std::string reason) {
  candidate.possible = false;
  candidate.reason = std::move(reason);
  return candidate;
}

class ExactCandidates {
 public:
  ExactCandidates(const StepProfile& profile, const LinkModel& link, const SearchOptions& options)
      : link_(link), options_(options), simulator_(profile, link, options.gradient_as_bucket_view) {}

  std::vector<Candidate> candidates() {
    Candidate reference = named("ddp", "default");
    reference.buckets = ddpBuckets(gradients());
    found_.push_back(timed(std::move(reference)));
    addWay(named("ddp", "program"));
    addDear("replicated");
    addDear("sharded");
    if (const std::string why = whyNoFactors(); !why.empty()) {
      found_.push_back(impossible(named("factors", ""), why));
    }
    return std::move(found_);
  }

 private:
  const std::vector<Gradient>& gradients() const { return simulator_.profile().gradients; }

  // By each transport.
  void addDear(const char* form) {
    Candidate candidate = named("dear", form);
    std::string why = refusal(candidate);
    if (why.empty() && link_.transports.empty()) {
      why = "no reduce-scatter was measured";
    }
    if (!why.empty()) {
      found_.push_back(impossible(std::move(candidate), std::move(why)));
      return;
    }
    for (const Transport& transport : link_.transports) {
      candidate.algorithm = toString(transport.algorithm);
      addWay(candidate);
    }
  }

  // The way by itself, and with layers as rows.
  void addWay(Candidate candidate) {
    if (const std::string why = refusal(candidate); !why.empty()) {
      found_.push_back(impossible(std::move(candidate), why));
      return;
    }
    cutBuckets(candidate);
    found_.push_back(timed(candidate));
    addRows(std::move(candidate));
  }

  // What pays beside DDP is tried beside dear, too: trials know only some buckets of dear's.
  void addRows(Candidate candidate) {
    const std::vector<int> chosen = factorLayers(candidate);
    if (candidate.way == "ddp") {
      beside_ddp_ = chosen;
    }
    std::vector<Candidate> with_rows;
    for (const std::vector<int>& layers : {chosen, beside_ddp_}) {
      if (!layers.empty() && (with_rows.empty() || layers != chosen)) {
        candidate.factor_layers = layers;
        cutBuckets(candidate);
        with_rows.push_back(timed(candidate));
      }
    }
    const auto best = std::min_element(with_rows.begin(), with_rows.end(), [](const Candidate& a, const Candidate& b) {
      return std::tuple(!a.possible, a.step_seconds) < std::tuple(!b.possible, b.step_seconds);
    });
    if (best != with_rows.end()) {
      found_.push_back(*best);
    }
  }

  std::string refusal(const Candidate& candidate) const {
    for (const std::string& key :
         {candidate.way, candidate.way + " " + candidate.form, candidate.way + " " + candidate.algorithm}) {
      if (const auto refused = options_.refused.find(key); refused != options_.refused.end()) {
        return refused->second;
      }
    }
    return "";
  }

  BucketCost reduceCost(const Candidate& candidate) const {
    return [this, candidate](std::size_t bytes) { return simulator_.reduceSeconds(candidate, bytes); };
  }

  // The buckets for all gradients but those that go as rows, by which the last gradient arrives first.
  void cutByProgram(Candidate& candidate) const {
    const std::vector<Gradient> ready = simulator_.gradientsOf(candidate);
    const PositionsByKind by_kind = gradientsByKind(ready, candidate.factor_layers);
    candidate.buckets = bucketsOfEnds(by_kind, optimalEnds(ready, by_kind, reduceCost(candidate)));
  }

  // The best of them.
  void cutBuckets(Candidate& candidate) const {
    if (candidate.way == "ddp") {
      cutByProgram(candidate);
      return;
    }
    const std::vector<Gradient> ready = simulator_.gradientsOf(candidate);
    const PositionsByKind by_kind = gradientsByKind(ready, candidate.factor_layers);
    const BucketCost reduce = reduceCost(candidate);
    Candidate trial = candidate;
    const auto step = [&](const EndsByKind& ends) {
      trial.buckets = bucketsOfEnds(by_kind, ends);
      return simulator_.run(trial).step_seconds;
    };
    candidate.buckets = bucketsOfEnds(by_kind, searchPartition(ready, by_kind, reduce, step).ends);
  }

  // Tried with the buckets that there are, less what goes as rows; and with new ones, which matters where a large
  // bucket had hidden behind the layer's. The first trials are those of the layers that save most.
  std::vector<int> factorLayers(const Candidate& candidate) {
    if (options_.refused.contains("factors")) {
      return {};
    }
    const BucketCost saved = [&](std::size_t bytes) {
      return simulator_.reduceSeconds(candidate, bytes) + simulator_.gatherSeconds(candidate, bytes);
    };
    int recuts = 0;
    const auto eligible = eligibleFactors(simulator_.profile(), link_, saved);
    std::vector<int> chosen = chooseFactors(eligible, [&](const std::vector<int>& layers) {
      Candidate trial = candidate;
      trial.factor_layers = layers;
      for (auto& bucket : trial.buckets) {
        std::erase_if(bucket, [&](int position) {
          return std::binary_search(layers.begin(), layers.end(), gradients()[index(position)].layer);
        });
      }
      std::erase_if(trial.buckets, [](const auto& bucket) { return bucket.empty(); });
      if (trial.buckets.empty()) {
        return std::numeric_limits<double>::infinity();  // DDP wraps no model of which it averages nothing
      }
      const double kept = simulator_.run(trial).step_seconds;
      if (layers.empty() || ++recuts > kMostRecuts) {
        return kept;
      }
      cutByProgram(trial);
      return std::min(kept, simulator_.run(trial).step_seconds);
    });
    factors_pay_ = factors_pay_ || !chosen.empty();
    return chosen;
  }

  std::string whyNoFactors() const {
    if (factors_pay_) {
      return "";
    }
    if (const auto refused = options_.refused.find("factors"); refused != options_.refused.end()) {
      return refused->second;
    }
    if (!link_.rows) {
      return "no exchange of rows was measured";
    }
    return simulator_.profile().layers.empty() ? "no layer whose rows could be sent" : "no layer has few enough rows";
  }

  // With times, where there is memory for it. The reference is always there.
  Candidate timed(Candidate candidate) const {
    candidate.extra_bytes = extraBytes(candidate);
    if (options_.spare_bytes > 0 && candidate.extra_bytes > options_.spare_bytes && candidate.form != "default") {
      std::string reason = concat("takes ", candidate.extra_bytes / 1e6, " MB of memory where ",
                                  options_.spare_bytes / 1e6, " MB are spare");
      return impossible(std::move(candidate), std::move(reason));
    }
    const ComputeSpans compute = simulator_.computeOf(candidate);
    candidate.compute_seconds = std::accumulate(compute.forward_seconds.begin(), compute.forward_seconds.end(),
                                                compute.backward_seconds + compute.optimizer_seconds);
    const Iteration iteration = simulator_.run(candidate);
    candidate.step_seconds = iteration.step_seconds;
    candidate.exposed_reduce_seconds = iteration.exposed_reduce_seconds;
    candidate.exposed_gather_seconds = iteration.exposed_gather_seconds;
    return candidate;
  }

  // Buckets beside the gradients, and the rows of all ranks until the step.
  double extraBytes(const Candidate& candidate) const {
    double bytes = 0;
    for (const auto& bucket : candidate.buckets) {
      const bool in_place = candidate.way == "ddp" && options_.gradient_as_bucket_view;
      bytes += in_place ? 0 : static_cast<double>(bucketBytes(gradients(), bucket));
    }
    for (const int layer : candidate.factor_layers) {
      bytes += link_.network.ranks * rowBytes(simulator_.profile().layers[index(layer)]);
    }
    return bytes;
  }

  const LinkModel& link_;
  const SearchOptions& options_;
  CandidateSimulator simulator_;
  std::vector<Candidate> found_;
  bool factors_pay_ = false;
  std::vector<int> beside_ddp_;  // layers that go as rows there
};

}  // namespace

std::vector<Candidate> exactCandidates(const StepProfile& profile, const LinkModel& link,
                                       const SearchOptions& options) {
  return ExactCandidates(profile, link, options).candidates();
}

}  // namespace torchext::core
