#include "core/pipeline/stage_costs.h"

#include <algorithm>
#include <cmath>

#include "core/auto/bucket_program.h"
#include "core/base/check.h"

namespace torchext::core {
namespace {

template <class Member>
std::vector<double> prefixSums(const std::vector<PipelineLayer>& layers, Member member) {
  std::vector<double> sums(layers.size() + 1, 0.0);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    sums[i + 1] = sums[i] + static_cast<double>(layers[i].*member);
  }
  return sums;
}

double between(const std::vector<double>& sums, int first, int last) {
  return sums[index(last) + 1] - sums[index(first)];
}

void checkRules(const StageRules& rules, const PipelineLink& link) {
  if (!std::isfinite(rules.overhead_seconds) || rules.overhead_seconds < 0) {
    throwInvalid("overhead_seconds", rules.overhead_seconds, "finite, 0 or more");
  }
  if (!std::isfinite(rules.state_factor) || rules.state_factor < 0) {
    throwInvalid("state_factor", rules.state_factor, "finite, 0 or more");
  }
  if (rules.data < 1 || (rules.data > 1 && !link.all_reduce.contains(rules.data))) {
    throwInvalid("data width", rules.data, "1, or one that has an all-reduce table");
  }
}

}  // namespace

StageCosts::StageCosts(const std::vector<PipelineLayer>& layers, const PipelineLink& link, const StageRules& rules)
    : layers_(layers), link_(link), rules_(rules) {
  checkLayers(layers);
  checkLink(link);
  checkRules(rules, link);
  forward_ = prefixSums(layers, &PipelineLayer::forward_seconds);
  backward_input_ = prefixSums(layers, &PipelineLayer::backward_input_seconds);
  backward_weight_ = prefixSums(layers, &PipelineLayer::backward_weight_seconds);
  kept_ = prefixSums(layers, &PipelineLayer::kept_bytes);
  parameters_ = prefixSums(layers, &PipelineLayer::parameter_bytes);
  const double latency = link.transfer.seconds(0);
  for (const PipelineLayer& layer : layers) {
    transfer_.push_back(link.transfer.seconds(layer.output_bytes));
    port_.push_back(link.shared_ports ? transfer_.back() - latency : 0);
  }
  transfer_.back() = 0;
  port_.back() = 0;
}

bool StageCosts::skipsInputGradient(int first) const { return first == 0 && !rules_.first_input_gradient; }

StageTimes StageCosts::times(int first, int last, bool recompute) const {
  StageTimes times;
  const double forward = between(forward_, first, last);
  const double weight = between(backward_weight_, first, last);
  const double overhead = rules_.overhead_seconds;
  times.forward_seconds = forward + overhead;
  if (skipsInputGradient(first)) {
    const double whole = backward_input_[index(last) + 1] - backward_input_[1] + weight;
    times.backward_weight_seconds = whole + overhead;
    times.backward_seconds = whole + overhead;
  } else {
    const double input = between(backward_input_, first, last);
    times.backward_input_seconds = input + overhead;
    times.backward_weight_seconds = weight + overhead;
    times.backward_seconds = input + weight + overhead;
  }
  times.backward_seconds += recompute ? forward : 0;
  times.transfer_seconds = transfer_[index(last)];
  times.port_seconds = port_[index(last)];
  if (rules_.data > 1) {
    times.sync_seconds = sync(first, last, false).exposed_seconds;
    times.split_sync_seconds = sync(first, last, true).exposed_seconds;
  }
  return times;
}

const StageSync& StageCosts::sync(int first, int last, bool split) const {
  const int key = (first * layers() + last) * 2 + (split ? 1 : 0);
  const auto [found, is_new] = syncs_.try_emplace(key);
  if (is_new && rules_.data > 1) {
    found->second = plannedSync(first, last, split);
  }
  return found->second;
}

// Layers without parameters have no gradient, and only make the others' later.
StageSync StageCosts::plannedSync(int first, int last, bool split) const {
  std::vector<double> ready;
  std::vector<std::size_t> bytes;
  std::vector<int> places;
  double now = 0;
  for (int layer = last; layer >= first; --layer) {
    const PipelineLayer& given = layers_[index(layer)];
    const bool with_input = skipsInputGradient(first) ? layer > 0 : !split;
    now += given.backward_weight_seconds + (with_input ? given.backward_input_seconds : 0);
    if (given.parameter_bytes > 0) {
      ready.push_back(now);
      bytes.push_back(given.parameter_bytes);
      places.push_back(last - layer);
    }
  }
  StageSync planned;
  if (bytes.empty()) {
    return planned;
  }
  if (split && !skipsInputGradient(first)) {
    std::fill(ready.begin(), ready.end(), now);  // W passes DDP's hooks by: the average follows the last one
  }
  const CostTable& table = link_.all_reduce.at(rules_.data);
  const BucketProgram program =
      optimalBuckets(ready, bytes, [&table](std::size_t nbytes) { return table.seconds(nbytes); });
  for (const int end : program.ends) {
    planned.bucket_ends.push_back(places[index(end - 1)] + 1);
  }
  planned.bucket_ends.back() = last - first + 1;
  planned.exposed_seconds = std::max(0.0, program.finish_seconds - now);
  return planned;
}

double StageCosts::staticBytes(int first, int last) const {
  return between(parameters_, first, last) * rules_.state_factor;
}

double StageCosts::keptBytes(int first, int last, bool recompute) const {
  return recompute ? static_cast<double>(layers_[index(last)].output_bytes) : between(kept_, first, last);
}

double StageCosts::peakBytes(int first, int last, bool recompute, int depth) const {
  return staticBytes(first, last) + depth * keptBytes(first, last, recompute) +
         (recompute ? between(kept_, first, last) : 0);
}

int StageCosts::depthLimit(int first, int last, bool recompute, double memory_bytes, int most) const {
  constexpr double kRounding = 1e-9;
  const double spare = memory_bytes - peakBytes(first, last, recompute, 0);
  const double kept = keptBytes(first, last, recompute);
  if (spare < 0) {
    return 0;
  }
  return spare >= most * kept ? most : static_cast<int>(spare / kept + kRounding);
}

}  // namespace torchext::core
