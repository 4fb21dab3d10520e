#include "fusion_settings.h"

#include <utility>

#include "core/auto/candidate_simulator.h"

namespace torchext::core::testing {
namespace {

// A module: elements of its tensors, and its share of the compute time.
struct Module {
  std::vector<std::size_t> elements;
  double compute;
};
using Model = std::vector<Module>;  // in forward order

void addConvolution(Model& model, std::size_t in, std::size_t out, std::size_t kernel, double compute) {
  model.push_back({{in * out * kernel * kernel}, 0.9 * compute});
  model.push_back({{out, out}, 0.1 * compute});  // batch norm
}

void addLinear(Model& model, std::size_t in, std::size_t out, double compute) {
  model.push_back({{in * out, out}, compute});
}

Model resnet50() {
  Model model;
  addConvolution(model, 3, 64, 7, 1);
  std::size_t in = 64;
  std::size_t width = 64;
  for (const int blocks : {3, 4, 6, 3}) {
    for (int block = 0; block < blocks; ++block) {
      addConvolution(model, in, width, 1, 0.25);
      addConvolution(model, width, width, 3, 0.5);
      addConvolution(model, width, 4 * width, 1, 0.25);
      if (block == 0) {
        addConvolution(model, in, 4 * width, 1, 0.25);
      }
      in = 4 * width;
    }
    width *= 2;
  }
  addLinear(model, 2048, 1000, 0.1);
  return model;
}

Model densenet201() {
  Model model;
  addConvolution(model, 3, 64, 7, 1);
  std::size_t in = 64;
  for (const int layers : {6, 12, 48, 32}) {
    for (int layer = 0; layer < layers; ++layer) {
      addConvolution(model, in, 128, 1, 0.1);
      addConvolution(model, 128, 32, 3, 0.1);
      in += 32;
    }
    addConvolution(model, in, in / 2, 1, 0.2);
    in /= 2;
  }
  addLinear(model, 1920, 1000, 0.1);
  return model;
}

Model vgg16() {
  Model model;
  std::size_t in = 3;
  for (const std::size_t out : {64U, 64U, 128U, 128U, 256U, 256U, 256U, 512U, 512U, 512U, 512U, 512U, 512U}) {
    model.push_back({{in * out * 9, out}, 1});
    in = out;
  }
  addLinear(model, 25088, 4096, 0.5);
  addLinear(model, 4096, 4096, 0.2);
  addLinear(model, 4096, 1000, 0.1);
  return model;
}

Model transformer(int layers, std::size_t hidden, std::size_t vocabulary) {
  Model model{{{vocabulary * hidden, 512 * hidden}, 0.1}};
  for (int layer = 0; layer < layers; ++layer) {
    model.push_back({{3 * hidden * hidden, 3 * hidden}, 0.25});
    model.push_back({{hidden * hidden, hidden}, 0.2});
    model.push_back({{hidden, hidden}, 0.02});
    model.push_back({{4 * hidden * hidden, 4 * hidden}, 0.3});
    model.push_back({{4 * hidden * hidden, hidden}, 0.3});
    model.push_back({{hidden, hidden}, 0.02});
  }
  return model;
}

constexpr double kTenGigabit = 1.1e9;

FusionSetting makeSetting(std::string name, const Model& model, double forward_seconds, const Network& network) {
  const double alpha = (network.ranks - 1) * network.link.latency_seconds;
  const double beta = (network.ranks - 1.0) / network.ranks / network.link.bytes_per_second;
  const CostTable half = CostTable::line(alpha, beta);
  const CostTable all_reduce = CostTable::line(2 * alpha, 2 * beta);
  FusionSetting setting{std::move(name), {}, {network, all_reduce, {{Algorithm::kRing, half, half}}, std::nullopt}};
  StepProfile& profile = setting.profile;
  double compute = 0;
  for (const Module& module : model) {
    compute += module.compute;
  }
  double now = 0;
  for (std::size_t i = model.size(); i-- > 0;) {
    now += 2 * forward_seconds * model[i].compute / compute;  // a backward pass takes two forward passes
    for (const std::size_t elements : model[i].elements) {
      profile.gradients.push_back({4 * elements, now, static_cast<int>(i), 0, -1});
    }
  }
  profile.backward_seconds = now;
  for (const Module& module : model) {
    profile.forward_seconds.push_back(forward_seconds * module.compute / compute);
  }
  return setting;
}

}  // namespace

double FusionSetting::seconds(double limit_mb) const {
  const PositionsByKind by_kind = gradientsByKind(profile.gradients);
  Candidate dear;
  dear.way = "dear";
  dear.algorithm = "ring";
  dear.form = "sharded";
  dear.buckets =
      bucketsOfEnds(by_kind, uniformEnds(profile.gradients, by_kind, static_cast<std::size_t>(limit_mb * kMb)));
  return CandidateSimulator(profile, link).run(dear).step_seconds;
}

const std::vector<FusionSetting>& fusionSettings() {
  static const std::vector<FusionSetting> all{
      makeSetting("ResNet-50, 16 ranks, 10 GbE", resnet50(), 0.040, {16, {40e-6, kTenGigabit}}),
      makeSetting("DenseNet-201, 64 ranks, 10 GbE", densenet201(), 0.060, {64, {25e-6, kTenGigabit}}),
      makeSetting("VGG-16, 128 ranks, 25 GbE", vgg16(), 0.080, {128, {25e-6, 2.5 * kTenGigabit}}),
      makeSetting("BERT-base, 16 ranks, 10 GbE", transformer(12, 768, 30522), 0.150, {16, {40e-6, kTenGigabit}}),
      makeSetting("BERT-large, 64 ranks, 100 Gb/s", transformer(24, 1024, 30522), 0.070,
                  {64, {5e-6, 10 * kTenGigabit}}),
      makeSetting("GPT of 1.3 B, 512 ranks, 200 Gb/s", transformer(24, 2048, 50257), 0.250,
                  {512, {5e-6, 20 * kTenGigabit}}),
  };
  return all;
}

}  // namespace torchext::core::testing
