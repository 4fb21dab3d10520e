#include "kfac/factors/factor_exchange.h"

#include <barrier>

#include "kit/kfac_parts.h"

namespace torchext {
namespace {

using kit::kRanks;
using kit::Meeting;
using kit::Parts;
using kit::Way;

class FactorExchangeTest : public kit::KfacRanksTest {};

// decay F + (1 - decay) new, from F = I, with A = mean of a a^T and G = N sum g g^T over a batch of N.
at::Tensor average(const at::Tensor& batch, bool input_side) {
  const auto samples = static_cast<double>(batch.size(0));
  const at::Tensor sum = batch.t().mm(batch);
  return 0.5 * at::eye(batch.size(1), at::kDouble) + 0.5 * (input_side ? sum / samples : sum * samples);
}

TEST_P(FactorExchangeTest, SumsAreThoseOfAllBatches) {
  const auto meeting = std::make_shared<Meeting>(kRanks);
  onRanks(kRanks, [&](int rank) {
    Parts parts(meeting, rank, GetParam(), kit::exactOptions("comm-opt"));
    parts.addBatch();
    parts.sendFactors();
    parts.factors.endBuckets();
    const auto& layouts = parts.accumulator->layouts();
    for (std::size_t i = 0; i < layouts.size(); ++i) {
      const auto [layer, input_side] = std::pair(layouts[i].layer, layouts[i].input_side);
      at::Tensor expected = at::zeros({layouts[i].dim, layouts[i].dim}, at::kDouble);
      for (int other = 0; other < kRanks; ++other) {
        expected += average(Parts::batch(layouts[i].dim, other + (input_side ? layer : 2 * layer)), input_side);
      }
      const at::Tensor found =
          parts.accumulator->unpacked(parts.accumulator->slice(parts.factors.summed(), layouts[i]), layouts[i]);
      EXPECT_TRUE(found.select(0, 0).equal(expected)) << "factor " << i << found << expected;
    }
    EXPECT_TRUE(parts.factors.mean().allclose(parts.factors.summed() / kRanks));
  });
}

TEST_P(FactorExchangeTest, AnOwnerAddsWhatOthersReduceToIt) {
  const auto meeting = std::make_shared<Meeting>(kRanks);
  onRanks(kRanks, [&](int rank) {
    Parts parts(meeting, rank, GetParam(), kit::exactOptions("pad"));
    parts.addBatch();
    parts.sendFactors();
    parts.factors.endBuckets();
    const at::Tensor summed = parts.factors.summed().clone();
    const at::Tensor mean = parts.factors.mean();
    const auto& layouts = parts.accumulator->layouts();
    for (std::size_t i = 0; i < layouts.size(); ++i) {
      if (parts.planner.plan().factors[i].owner == rank) {
        EXPECT_TRUE(
            parts.accumulator->slice(summed, layouts[i]).allclose(parts.accumulator->slice(mean, layouts[i]) * kRanks));
      }
    }
  });
}

TEST_P(FactorExchangeTest, VotesNameTheFirstRankThatDiffers) {
  const auto meeting = std::make_shared<Meeting>(kRanks);
  onRanks(kRanks, [&](int rank) {
    Parts parts(meeting, rank, GetParam(), kit::exactOptions("comm-opt"));
    const at::Tensor beside = at::full({2}, 10 + rank, at::kLong);
    const auto all = parts.factors.vote(/*takes_step=*/true, beside);
    EXPECT_EQ(all.differing, -1);
    EXPECT_FALSE(all.again);
    EXPECT_EQ(all.beside[2][1].item<std::int64_t>(), 12);
    const auto some = parts.factors.vote(/*takes_step=*/rank != 1, beside);
    EXPECT_EQ(some.differing, rank == 1 ? 0 : 1);
  });
}

// Factors leave when a layer has had as many calls as before; one more makes all ranks send again.
TEST_P(FactorExchangeTest, ALaterCallMakesAllSendAgain) {
  const auto meeting = std::make_shared<Meeting>(kRanks);
  onRanks(kRanks, [&](int rank) {
    Parts parts(meeting, rank, GetParam(), kit::exactOptions("comm-opt"));
    for (int step = 0; step < 2; ++step) {
      parts.addBatch();
      parts.sendFactors();
      parts.factors.endBuckets();
    }
    parts.addBatch(/*pass=*/0);
    const bool leaves_early = GetParam() != Way::kMemory;
    EXPECT_EQ(parts.factors.started() > 0, leaves_early);
    if (rank == 1) {
      parts.addBatch(/*pass=*/1);
    }
    parts.factors.startRest(/*loss_scale=*/1);
    const auto votes = parts.factors.vote(/*takes_step=*/true, at::zeros({1}, at::kLong));
    EXPECT_EQ(votes.again, leaves_early);
    parts.factors.endBuckets();
  });
}

TEST_P(FactorExchangeTest, APeerThatDiesLeavesTheAveragesAsTheyWere) {
  const auto meeting = std::make_shared<Meeting>(kRanks);
  std::barrier<> made(kRanks);
  onRanks(kRanks, [&](int rank) {
    Parts parts(meeting, rank, GetParam(), kit::exactOptions("comm-opt"));
    made.arrive_and_wait();
    if (rank == 1) {
      meeting->dieAt(1, 1);
    }
    const at::Tensor before = parts.accumulator->running().clone();
    parts.addBatch();
    const std::string error = kit::errorOf([&] { parts.sendFactors(); });
    EXPECT_TRUE(kit::has(error, "gone")) << error;
    EXPECT_TRUE(parts.accumulator->running().equal(before));
  });
}

TEST_P(FactorExchangeTest, AnAbortEndsAVote) {
  const auto meeting = std::make_shared<Meeting>(kRanks);
  std::barrier<> made(kRanks);
  onRanks(kRanks, [&](int rank) {
    Parts parts(meeting, rank, GetParam(), kit::exactOptions("comm-opt"));
    made.arrive_and_wait();
    if (rank == 1) {
      meeting->abort();
      return;
    }
    const std::string error = kit::errorOf([&] { parts.factors.vote(/*takes_step=*/true, at::zeros({1}, at::kLong)); });
    EXPECT_TRUE(kit::has(error, "aborted")) << error;
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, FactorExchangeTest, kit::kAllWays, kit::nameOf);

}  // namespace
}  // namespace torchext
