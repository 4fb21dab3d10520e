// The embedding bag's kernels on every instruction set that this processor has, against the baseline.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/cpu/bag_backward.h"
#include "kernels/cpu/bag_forward.h"
#include "kernels/cpu/bag_sinks.h"
#include "kernels/cpu/isa.h"

namespace torchext::cpu {
namespace {

template <class T>
std::vector<T> normal(std::size_t n, std::mt19937& random) {
  std::normal_distribution<float> draw(0.0F, 1.0F);
  std::vector<T> values(n);
  for (T& value : values) {
    value = Element<T>::store(static_cast<MathOf<T>>(draw(random)));
  }
  return values;
}

// Two of three chunks are resident; bags of 0 to 30 positions, some of padding.
template <class T>
struct Case {
  static constexpr std::int64_t kRows = 60;
  static constexpr int kChunks = 3;

  Case(std::size_t width_in, BagMode mode, bool weighted) : width(width_in), cells(kRows * kChunks) {
    std::mt19937 random(3);
    std::int32_t slots = 0;
    for (std::int32_t& cell : cells) {
      cell = random() % 3 != 0 ? slots++ : core::ChunkIndex::kAbsent;
    }
    pool = normal<T>(static_cast<std::size_t>(slots) * width, random);
    batch.mode = mode;
    batch.padding = 7;
    batch.offsets = {0};
    for (int bag = 0; bag < 50; ++bag) {
      const std::size_t size = random() % 31;
      for (std::size_t i = 0; i < size; ++i) {
        batch.ids.push_back(static_cast<std::uint32_t>(random() % kRows));
      }
      batch.offsets.push_back(batch.offsets.back() + static_cast<std::int64_t>(size));
    }
    gradient = normal<T>(50 * kChunks * width, random);
    if (weighted) {
      weights = normal<T>(batch.ids.size(), random);
    }
    state = std::vector<MathOf<T>>(pool.size(), MathOf<T>{1});
  }

  core::ChunkIndex index() { return core::ChunkIndex::direct(cells, kRows, kChunks); }
  const T* weightsOrNull() const { return weights.empty() ? nullptr : weights.data(); }

  std::size_t width;
  std::vector<std::int32_t> cells;
  BagBatch batch;
  std::vector<T> pool;
  std::vector<T> gradient;
  std::vector<T> weights;
  std::vector<MathOf<T>> state;
};

template <class T>
std::vector<double> numbers(const std::vector<T>& values) {
  std::vector<double> result;
  for (const T& value : values) {
    result.push_back(static_cast<double>(Element<T>::load(value)));
  }
  return result;
}

// All that one step makes: bags, gradients of weights, the pool after an update by Adagrad and one by Adam, utilities.
template <class T>
std::vector<std::vector<double>> stepOn(Isa isa, Case<T> step) {
  const core::ChunkIndex index = step.index();
  const BagBatch& batch = step.batch;
  std::vector<std::vector<double>> made;
  withWidth<T>(step.width, [&](auto width) {
    std::vector<T> output(step.gradient.size());
    std::vector<std::int32_t> argmax(batch.mode == BagMode::kMax ? output.size() : 0);
    const ForwardArgs<T> forward{batch, index, step.pool.data(), step.weightsOrNull(), output.data(), argmax.data()};
    onIsa<ForwardKernel>(isa, forward, width, std::int64_t{0}, batch.bags());
    made.push_back(numbers(output));
    made.emplace_back(argmax.begin(), argmax.end());

    std::vector<T> of_weights(batch.ids.size());
    const WeightGradientArgs<T> weight_gradient{batch, index, step.pool.data(), step.gradient.data(),
                                                of_weights.data()};
    onIsa<WeightGradientKernel>(isa, weight_gradient, width, std::int64_t{0}, batch.bags());
    made.push_back(numbers(of_weights));

    const GroupedIds grouped = groupIds(batch, Case<T>::kRows);
    const auto bag_of = batch.bagOf();
    const auto inverse = batch.inverseCounts();
    std::vector<float> utilities(Case<T>::kRows * Case<T>::kChunks);
    auto utility = core::ChunkUtility::floats(utilities);
    const BackwardArgs<T> backward{batch,
                                   grouped,
                                   index,
                                   step.gradient.data(),
                                   step.weightsOrNull(),
                                   argmax.data(),
                                   bag_of.data(),
                                   inverse.data(),
                                   true,
                                   &utility,
                                   1.5F,
                                   1,
                                   nullptr};
    std::vector<MathOf<T>> sums(step.pool.size(), MathOf<T>{1});
    const AdagradSink<T> adagrad{step.pool.data(), sums.data(), MathOf<T>{0.1F}, MathOf<T>{1e-8F}};
    onIsa<BackwardKernel>(isa, backward, width, adagrad, std::size_t{0}, grouped.groups());
    made.push_back(numbers(step.pool));
    made.emplace_back(sums.begin(), sums.end());
    const AdamSink<T> adam{step.pool.data(), sums.data(),      step.state.data(), MathOf<T>{0.1F},
                           MathOf<T>{0.9F},  MathOf<T>{0.99F}, MathOf<T>{1e-8F}};
    onIsa<BackwardKernel>(isa, backward, width, adam, std::size_t{0}, grouped.groups());
    made.push_back(numbers(step.pool));
    made.emplace_back(step.state.begin(), step.state.end());
    made.emplace_back(utilities.begin(), utilities.end());
  });
  return made;
}

template <class T>
class BagOnEveryIsa : public testing::Test {};
using PoolTypes = testing::Types<float, double, Half, BFloat16>;
TYPED_TEST_SUITE(BagOnEveryIsa, PoolTypes);

TYPED_TEST(BagOnEveryIsa, IsTheBaselineUpToRounding) {
  if (bestIsa() == Isa::kBaseline) {
    GTEST_SKIP() << "this processor has the baseline only";
  }
  using T = TypeParam;
  const double unit = std::is_same_v<T, double>  ? 1e-13
                      : std::is_same_v<T, float> ? 1e-5
                      : std::is_same_v<T, Half>  ? 2e-3
                                                 : 1.6e-2;  // sums of 30 numbers; an ulp and a half of 16-bit ones
  for (const std::size_t width : {4, 8, 12, 16, 32, 48, 64, 128}) {
    for (const auto& [mode, weighted] : {std::pair(BagMode::kSum, false), std::pair(BagMode::kSum, true),
                                         std::pair(BagMode::kMean, false), std::pair(BagMode::kMax, false)}) {
      const Case<T> step(width, mode, weighted);
      const auto expected = stepOn(Isa::kBaseline, step);
      for (const Isa isa : {Isa::kAvx2, Isa::kAvx512}) {
        if (isa > bestIsa()) {
          continue;
        }
        const auto made = stepOn(isa, step);
        ASSERT_EQ(made.size(), expected.size());
        for (std::size_t part = 0; part < made.size(); ++part) {
          ASSERT_EQ(made[part].size(), expected[part].size());
          for (std::size_t i = 0; i < made[part].size(); ++i) {
            ASSERT_NEAR(made[part][i], expected[part][i], unit * (1 + std::abs(expected[part][i])))
                << "width " << width << ", mode " << static_cast<int>(mode) << ", part " << part << ", at " << i;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace torchext::cpu
