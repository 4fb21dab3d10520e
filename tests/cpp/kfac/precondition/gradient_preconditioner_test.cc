#include "kfac/precondition/gradient_preconditioner.h"

#include <barrier>
#include <cmath>
#include <limits>

#include "kit/kfac_parts.h"

namespace torchext {
namespace {

using kit::kRanks;
using kit::Meeting;
using kit::Parts;
using kit::Way;

class GradientPreconditionerTest : public kit::KfacRanksTest {
 protected:
  static at::Tensor gradientOf(const KfacLayerSpec& spec) {
    return (at::arange(spec.weight.numel(), at::kDouble) - 2).view(spec.weight.sizes());
  }
  // Parts with a gradient, the same on all ranks, and inverses that are whole: G^-1 = diag(1, 2), A^-1 = diag(1, 2, 3).
  static void prepare(Parts& parts) {
    for (const KfacLayerSpec& spec : parts.context.layers) {
      spec.weight.mutable_grad() = gradientOf(spec);
    }
    for (std::size_t i = 0; i < parts.accumulator->layouts().size(); ++i) {
      parts.inverses.load(i, {diagonal(parts.accumulator->layouts()[i].dim).unsqueeze(0), {}});
    }
  }
  static at::Tensor diagonal(std::int64_t dim) { return at::arange(1, dim + 1, at::kDouble).diag(); }
  static at::Tensor expected(const KfacLayerSpec& spec) {
    return diagonal(spec.outputs()).mm(gradientOf(spec)).mm(diagonal(spec.inputs()));
  }
  static void check(Way way, KfacOptions options) {
    const auto meeting = std::make_shared<Meeting>(kRanks);
    onRanks(kRanks, [&](int rank) {
      Parts parts(meeting, rank, way, options);
      for (int step = 0; step < 2; ++step) {
        prepare(parts);
        ASSERT_TRUE(parts.gradients.load(/*scale=*/1, {}));
        parts.gradients.makeRest();
        parts.gradients.exchange();
        parts.gradients.write({0.5, 0.5});
        for (const KfacLayerSpec& spec : parts.context.layers) {
          EXPECT_TRUE(spec.weight.grad().equal(expected(spec))) << spec.name << spec.weight.grad() << expected(spec);
        }
      }
    });
  }
};

TEST_P(GradientPreconditionerTest, EveryRankMakesAll) { check(GetParam(), kit::exactOptions("comm-opt")); }
TEST_P(GradientPreconditionerTest, OwnersSendWhatTheyMake) { check(GetParam(), kit::exactOptions("mem-opt")); }
TEST_P(GradientPreconditionerTest, WorkersServeTheRest) {
  KfacOptions options = kit::exactOptions("hybrid");
  options.worker_fraction = 0.67;
  check(GetParam(), options);
}
TEST_P(GradientPreconditionerTest, RanksMakeSharesOfColumns) {
  KfacOptions options = kit::exactOptions("comm-opt");
  options.split_directions = true;
  check(GetParam(), options);
}

TEST_P(GradientPreconditionerTest, TheClipIsThatOfAllLayers) {
  const auto meeting = std::make_shared<Meeting>(kRanks);
  onRanks(kRanks, [&](int rank) {
    KfacOptions options = kit::exactOptions("mem-opt");
    options.kl_clip = 0.25;
    Parts parts(meeting, rank, GetParam(), options);
    prepare(parts);
    ASSERT_TRUE(parts.gradients.load(/*scale=*/1, {}));
    parts.gradients.makeRest();
    parts.gradients.exchange();
    parts.gradients.write({0.5, 0.25});
    double sum = 0;
    for (int layer = 0; layer < 2; ++layer) {
      const KfacLayerSpec& spec = parts.context.layer(layer);
      const double rate = layer == 0 ? 0.5 : 0.25;
      sum += rate * rate * (expected(spec) * gradientOf(spec)).sum().item<double>();
    }
    const double clip = std::sqrt(0.25 / sum);
    EXPECT_DOUBLE_EQ(parts.gradients.clip(), clip);
    for (const KfacLayerSpec& spec : parts.context.layers) {
      EXPECT_TRUE(spec.weight.grad().allclose(expected(spec) * clip));
    }
  });
}

TEST_P(GradientPreconditionerTest, NothingIsWrittenOfAGradientThatIsNotFinite) {
  const auto meeting = std::make_shared<Meeting>(kRanks);
  onRanks(kRanks, [&](int rank) {
    Parts parts(meeting, rank, GetParam(), kit::exactOptions("mem-opt"));
    prepare(parts);
    parts.context.layer(1).weight.grad()[0][0] = std::numeric_limits<double>::infinity();
    EXPECT_FALSE(parts.gradients.load(/*scale=*/1, {}));
    parts.gradients.skip();
    EXPECT_TRUE(parts.context.layer(0).weight.grad().equal(gradientOf(parts.context.layer(0))));
    prepare(parts);
    EXPECT_FALSE(parts.gradients.load(/*scale=*/1, {at::full({1}, std::nan(""), at::kDouble)}));
    EXPECT_TRUE(parts.gradients.load(/*scale=*/1, {}));
  });
}

// All or nothing: a rank that has not got all directions has written none.
TEST_P(GradientPreconditionerTest, APeerThatDiesLeavesGradientsAsTheyWere) {
  const auto meeting = std::make_shared<Meeting>(kRanks);
  std::barrier<> made(kRanks);
  onRanks(kRanks, [&](int rank) {
    Parts parts(meeting, rank, GetParam(), kit::exactOptions("mem-opt"));
    prepare(parts);
    const int victim = parts.planner.plan().layer_owner[0];
    made.arrive_and_wait();
    if (rank == victim) {
      meeting->dieAt(victim, 1);
    }
    ASSERT_TRUE(parts.gradients.load(/*scale=*/1, {}));
    const std::string error = kit::errorOf([&] {
      parts.gradients.makeRest();
      parts.gradients.exchange();
    });
    EXPECT_TRUE(kit::has(error, "gone")) << error;
    for (const KfacLayerSpec& spec : parts.context.layers) {
      EXPECT_TRUE(spec.weight.grad().equal(gradientOf(spec)));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, GradientPreconditionerTest, kit::kAllWays, kit::nameOf);

}  // namespace
}  // namespace torchext
