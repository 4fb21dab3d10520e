// KfacRanksTest runs the parts of K-FAC's engine on ranks that are threads, over a FakeCommunicator.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>

#include "kfac/base/engine_guards.h"
#include "kfac/comm/kfac_context.h"
#include "kfac/engine/kfac_planner.h"
#include "kfac/factors/factor_accumulator.h"
#include "kfac/factors/factor_exchange.h"
#include "kfac/inverses/inverse_update.h"
#include "kfac/precondition/gradient_preconditioner.h"
#include "kit/error_text.h"
#include "kit/fake_communicator.h"

namespace torchext::kit {

inline constexpr int kRanks = 3;

// A Linear layer without bias, its weight [outputs, inputs] of doubles, which tests choose small and whole.
inline KfacLayerSpec linear(const std::string& name, std::int64_t inputs, std::int64_t outputs) {
  return {.name = name,
          .weight = at::zeros({outputs, inputs}, at::kDouble),
          .bias = {},
          .stride = {},
          .dilation = {},
          .pad_before = {},
          .pad_after = {}};
}

inline std::vector<KfacLayerSpec> twoLayers() { return {linear("first", 3, 2), linear("second", 2, 2)}; }

// Factors in every step; decay and damping exact in binary.
inline KfacOptions exactOptions(const std::string& strategy) {
  KfacOptions options;
  options.strategy = strategy;
  options.decay = 0.5;
  options.damping = 0.25;
  options.kl_clip = std::nullopt;
  options.inverse_update_steps = 1;
  options.split_directions = false;
  options.gather_rows = false;
  return options;
}

// What a rank's engine is made of, but for its hooks.
struct Parts {
  Parts(const std::shared_ptr<Meeting>& meeting, int rank, Way way, KfacOptions options)
      : context(twoLayers(), std::move(options), std::make_unique<FakeCommunicator>(meeting, rank, way)),
        accumulator(makeAccumulator(context)),
        planner(context, *accumulator),
        factors(context, *accumulator, planner.plan()),
        inverses(context, *accumulator, factors, planner.plan()),
        gradients(context, planner.plan(), planner.input(), accumulator->options(), planner.usesTiles(),
                  inverses.inverses()) {}

  // What hooks do of a step: a batch of `rank`, two samples for each layer, last layer first.
  void addBatch(int pass = 0) {
    for (int layer = context.layerCount() - 1; layer >= 0; --layer) {
      const KfacLayerSpec& spec = context.layer(layer);
      factors.add(layer, batch(spec.inputs(), context.rank + layer), batch(spec.outputs(), context.rank + 2 * layer),
                  pass, /*may_leave=*/true);
    }
  }
  static at::Tensor batch(std::int64_t width, int seed) {
    return (at::arange(2 * width, at::kDouble) + seed).view({2, width}).remainder(3);
  }
  // Sends a step's factors; all ranks take the step.
  void sendFactors() {
    factors.startRest(/*loss_scale=*/1);
    factors.vote(/*takes_step=*/true, at::zeros({1}, at::kLong));
    factors.sumAtOnce();
    factors.merge(/*loss_scale=*/1);
  }

  EngineGuards guards;
  KfacContext context;
  std::unique_ptr<FactorAccumulator> accumulator;
  KfacPlanner planner;
  FactorExchange factors;
  InverseUpdate inverses;
  GradientPreconditioner gradients;
};

class KfacRanksTest : public ::testing::TestWithParam<Way> {
 protected:
  // Runs body(rank) on a thread for each rank. What one throws fails the test.
  static void onRanks(int size, const std::function<void(int rank)>& body) {
    std::vector<std::thread> threads;
    threads.reserve(static_cast<std::size_t>(size));
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&body, rank] {
        at::set_num_threads(1);
        const std::string error = errorOf([&] { body(rank); });
        EXPECT_EQ(error, "") << "on rank " << rank;
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
};

inline std::string nameOf(const ::testing::TestParamInfo<Way>& info) {
  return info.param == Way::kMessages ? "Messages" : info.param == Way::kMemory ? "Memory" : "Device";
}

inline const auto kAllWays = ::testing::Values(Way::kMessages, Way::kMemory, Way::kDevice);

}  // namespace torchext::kit
