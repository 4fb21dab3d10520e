#include "core/kfac/kfac_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <stdexcept>
#include <vector>

#include "core/base/check.h"
#include "core/kfac/packed_triangle.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

constexpr KfacStrategy kAll[] = {KfacStrategy::kSpd,    KfacStrategy::kPad,    KfacStrategy::kCommOpt,
                                 KfacStrategy::kMemOpt, KfacStrategy::kHybrid, KfacStrategy::kDp,
                                 KfacStrategy::kDkfac,  KfacStrategy::kAuto};

KfacPlanInput input(const std::vector<std::size_t>& dims, int ranks) {
  KfacPlanInput made;
  made.ranks = ranks;
  made.costs = {{1e-4, 1e-9}, {1e-4, 0.5e-9}, {1e-6, 1e-10}};
  for (std::size_t layer = 0; layer < dims.size(); ++layer) {
    for (int side = 0; side < 2; ++side) {
      const std::size_t bytes = 4 * packedSize(dims[layer]);
      made.tasks.push_back({static_cast<int>(layer), dims[layer], 1, bytes, bytes, false});
    }
    made.gradient_bytes.push_back(4 * dims[layer] * dims[layer]);
  }
  return made;
}

TEST(KfacPlan, NamesGoBothWays) {
  for (const auto strategy : kAll) {
    EXPECT_EQ(parseKfacStrategy(kfacStrategyName(strategy)), strategy);
  }
  EXPECT_THROW_MESSAGE(parseKfacStrategy("kaisa"), std::invalid_argument, "strategy = \"kaisa\": allowed spd, pad");
}

TEST(KfacPlan, OneRankDoesEverythingItself) {
  for (const auto strategy : kAll) {
    const auto in = input({10, 20}, 1);
    const KfacPlan plan = makeKfacPlan(strategy, in);
    EXPECT_TRUE(std::all_of(plan.factors.begin(), plan.factors.end(), [](auto& f) { return f.everyone_inverts; }));
    EXPECT_EQ(plan.workers, (std::vector<int>{1, 1}));
    EXPECT_EQ(predictKfac(plan, in).exchange + predictKfac(plan, in).gradients, 0);
  }
}

TEST(KfacPlan, SpdInvertsSmallFactorsEverywhereAndPlacesLargeOnes) {
  const KfacPlan plan = makeKfacPlan(KfacStrategy::kSpd, input({16, 1000, 1000}, 4));
  EXPECT_TRUE(plan.factors[0].everyone_inverts);  // 1.4 us against 100 us of a broadcast
  std::set<int> owners;
  for (std::size_t i = 2; i < 6; ++i) {
    EXPECT_FALSE(plan.factors[i].everyone_inverts);
    EXPECT_EQ(plan.factors[i].exchange, FactorExchange::kAllReduce);
    owners.insert(plan.factors[i].owner);
  }
  EXPECT_EQ(owners.size(), 4U);  // four equal tasks on four ranks
}

TEST(KfacPlan, PadReducesToConsecutiveOwners) {
  const KfacPlan plan = makeKfacPlan(KfacStrategy::kPad, input({100, 100, 100, 100}, 2));
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(plan.factors[i].owner, i < 4 ? 0 : 1);
    EXPECT_EQ(plan.factors[i].exchange, FactorExchange::kReduceToOwner);
  }
  EXPECT_EQ(plan.fusion_ends, (std::vector<int>{4, 8}));  // one reduce an owner
}

TEST(KfacPlan, PadGoesRoundTheOwnersOverLinks) {
  const auto owners = [](const KfacPlanInput& in) {
    std::vector<int> of_layers;
    const KfacPlan plan = makeKfacPlan(KfacStrategy::kPad, in);
    for (std::size_t i = 0; i < plan.factors.size(); i += 2) {
      EXPECT_EQ(plan.factors[i].owner, plan.factors[i + 1].owner);
      of_layers.push_back(plan.factors[i].owner);
    }
    return of_layers;
  };
  // 32 MB of factors, 8 MB a rank: worth two messages of 16 x 0.1 ms x 2 GB/s = 3.2 MB.
  auto in = input(std::vector<std::size_t>(8, 1000), 4);
  EXPECT_EQ(owners(in), (std::vector<int>{0, 1, 2, 3, 0, 1, 2, 3}));
  in.costs.broadcast.alpha = 3e-4;
  EXPECT_EQ(owners(in), (std::vector<int>{0, 0, 1, 1, 2, 2, 3, 3}));
  // Whole layers in one round, too, where single factors would be hardly more even: 21 each.
  auto odd = input(std::vector<std::size_t>(21, 1000), 2);
  odd.costs.broadcast.alpha = 1;
  const std::vector<int> halves = owners(odd);
  const auto other = std::find(halves.begin(), halves.end(), 1 - halves.front());
  EXPECT_NEAR(static_cast<double>(other - halves.begin()), 10.5, 0.5);
  EXPECT_EQ(std::count(other, halves.end(), halves.front()), 0);
  in.costs.broadcast.alpha = 1e-4;
  in.costs.sharing = AlphaBeta{3e-5, 1e-10};  // all in one go anyway
  EXPECT_EQ(owners(in), (std::vector<int>{0, 0, 1, 1, 2, 2, 3, 3}));
  // Half of one large layer outweighs all others: no round of whole layers is as even as one round of factors.
  const KfacPlan uneven =
      makeKfacPlan(KfacStrategy::kPad, input({1400, 400, 400, 400, 400, 400, 400, 400, 400, 400, 400, 400}, 2));
  EXPECT_EQ(uneven.factors[0].owner, 0);
  EXPECT_TRUE(std::all_of(uneven.factors.begin() + 1, uneven.factors.end(), [](auto& f) { return f.owner == 1; }));
}

TEST(KfacPlan, PadSendsGradientsWhereInversesCostMore) {
  auto in = input({500, 500}, 2);
  in.steps_per_inverse = 1;
  in.gradient_bytes = {1000, 4U << 20};
  const KfacPlan every_step = makeKfacPlan(KfacStrategy::kPad, in);
  EXPECT_EQ(every_step.workers, (std::vector<int>{1, 2}));
  in.steps_per_inverse = 100;
  EXPECT_EQ(makeKfacPlan(KfacStrategy::kPad, in).workers, (std::vector<int>{2, 2}));
  EXPECT_GT(predictKfac(every_step, in).gradients, 0);
}

TEST(KfacPlan, PadKeepsInversesEverywhereForRowsThatAreWorthIt) {
  // The last layer's inverses cost its links more than its gradient does, the others' less.
  auto in = input({500, 500, 500}, 2);
  in.steps_per_inverse = 1;
  in.gradient_bytes = {4U << 20, 4U << 20, 1000};
  const auto workers = [&] { return makeKfacPlan(KfacStrategy::kPad, in).workers; };
  const std::vector<int> everywhere{2, 2, 2};
  const std::vector<int> but_one{2, 2, 1};
  EXPECT_EQ(workers(), but_one);
  in.precondition = {1e-3, 1e-3, 1e-3};
  EXPECT_EQ(workers(), but_one);
  in.of_rows = {true, true, true};
  EXPECT_EQ(workers(), everywhere);
  in.of_rows = {true, true, false};
  EXPECT_EQ(workers(), but_one);
  in.of_rows = {true, true, true};
  in.precondition = {1e-5, 1e-5, 1e-5};  // directions are cheap anyway
  EXPECT_EQ(workers(), but_one);
  in.of_rows = {true};
  EXPECT_THROW_MESSAGE(workers(), std::invalid_argument, "layers of rows = 1");
}

TEST(KfacPlan, KaisasFamilyDiffersInItsWorkers) {
  auto in = input({100, 100, 100, 100}, 4);
  EXPECT_EQ(makeKfacPlan(KfacStrategy::kCommOpt, in).workers[0], 4);
  EXPECT_EQ(makeKfacPlan(KfacStrategy::kMemOpt, in).workers[0], 1);
  EXPECT_EQ(makeKfacPlan(KfacStrategy::kHybrid, in).workers[0], 2);
  in.worker_fraction = 0.01;
  EXPECT_EQ(makeKfacPlan(KfacStrategy::kHybrid, in).workers[0], 1);
  const KfacPlan dp = makeKfacPlan(KfacStrategy::kDp, in);
  EXPECT_EQ(dp.factors[0].exchange, FactorExchange::kOwnersOwn);
  EXPECT_EQ(predictKfac(dp, in).exchange, 0);
}

// Another owner is another result there. The layers are those of tests/distributed/kfac/kfac_net.py, of which the third
// once belonged to rank 1 or 2, whichever was expected to be done sooner.
TEST(KfacPlan, DpsOwnersAreTheSameWhateverWasMeasured) {
  KfacPlanInput in;
  in.ranks = 3;
  in.gradient_bytes = {320, 608, 336, 1656, 216};
  constexpr std::size_t kDims[][2] = {{4, 10}, {2, 19}, {6, 7}, {9, 23}, {3, 9}};
  for (int layer = 4; layer >= 0; --layer) {
    for (const std::size_t dim : kDims[layer]) {
      in.tasks.push_back({layer, dim, layer == 1 ? 2U : 1U, 8 * packedSize(dim), 8 * packedSize(dim), dim == 7});
    }
  }
  for (const InversionCost inversion :
       {InversionCost{1e-6, 1e-10}, InversionCost{1e-6, 2e-10}, InversionCost{1e-6, 0}, InversionCost{0, 1e-10}}) {
    in.costs.inversion = inversion;
    EXPECT_EQ(makeKfacPlan(KfacStrategy::kDp, in).layer_owner, (std::vector<int>{2, 0, 1, 1, 2}))
        << inversion.fixed << " s + " << inversion.cubic << " s * dim^3";
  }
}

TEST(KfacPlan, EveryRankIsAWorkerOrServedByOne) {
  for (int ranks = 1; ranks <= 7; ++ranks) {
    for (int owner = 0; owner < ranks; ++owner) {
      for (int count = 1; count <= ranks; ++count) {
        int workers = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          const bool worker = KfacPlan::isWorker(rank, owner, count, ranks);
          workers += worker ? 1 : 0;
          const int server = KfacPlan::serverOf(rank, owner, count, ranks);
          ASSERT_TRUE(KfacPlan::isWorker(server, owner, count, ranks));
          if (worker) {
            ASSERT_EQ(server, rank);
          }
        }
        ASSERT_EQ(workers, count);
        ASSERT_TRUE(KfacPlan::isWorker(owner, owner, count, ranks));
      }
    }
  }
}

TEST(KfacPlan, PlainDkfacFusesNothingAndCostsMore) {
  const auto in = input({300, 300, 300, 300}, 4);
  const KfacPlan plain = makeKfacPlan(KfacStrategy::kDkfac, in);
  EXPECT_EQ(plain.fusion_ends.size(), 8U);
  const double seconds = predictKfac(plain, in).perStep(10);
  for (const auto strategy : kAll) {
    EXPECT_LE(predictKfac(makeKfacPlan(strategy, in), in).exchange, predictKfac(plain, in).exchange);
  }
  EXPECT_LT(predictKfac(makeKfacPlan(KfacStrategy::kAuto, in), in).perStep(10), seconds);
}

TEST(KfacPlan, AutoIsTheCheapestExactPreset) {
  for (const int steps : {1, 10, 100}) {
    auto in = input({32, 64, 700, 1000, 10}, 4);
    in.steps_per_inverse = steps;
    const KfacPlan chosen = makeKfacPlan(KfacStrategy::kAuto, in);
    EXPECT_NE(chosen.strategy, KfacStrategy::kDp);
    for (const auto strategy :
         {KfacStrategy::kSpd, KfacStrategy::kPad, KfacStrategy::kCommOpt, KfacStrategy::kMemOpt}) {
      EXPECT_LE(predictKfac(chosen, in).perStep(steps), predictKfac(makeKfacPlan(strategy, in), in).perStep(steps));
    }
  }
}

TEST(KfacPlan, RunsKeepToTheLimit) {
  auto in = input({100, 100, 100, 100}, 2);
  in.bucket_cap_bytes = 2 * in.tasks[0].factor_bytes;
  EXPECT_EQ(makeKfacPlan(KfacStrategy::kSpd, in).fusion_ends, (std::vector<int>{2, 4, 6, 8}));
  in.bucket_cap_bytes = 1;
  EXPECT_EQ(makeKfacPlan(KfacStrategy::kSpd, in).fusion_ends.size(), 8U);
}

TEST(KfacPlan, RunsAreNoLongerThanMakesTheirStartUpCountLittle) {
  auto in = input({1000, 1000}, 2);  // four factors of 2.002 MB
  EXPECT_EQ(makeKfacPlan(KfacStrategy::kSpd, in).fusion_ends, (std::vector<int>{1, 2, 3, 4}));  // 16 x 0.1 MB
  in.costs.all_reduce = {4.1e-4, 1e-9};
  EXPECT_EQ(makeKfacPlan(KfacStrategy::kSpd, in).fusion_ends, (std::vector<int>{3, 4}));
  in.costs.all_reduce = {1e-3, 1e-9};
  EXPECT_EQ(makeKfacPlan(KfacStrategy::kSpd, in).fusion_ends, (std::vector<int>{4}));
  in.bucket_cap_bytes = 5'000'000;
  EXPECT_EQ(makeKfacPlan(KfacStrategy::kSpd, in).fusion_ends, (std::vector<int>{2, 4}));
  in.bucket_cap_bytes = 0;
  in.costs.all_reduce = {1e-4, 1e-9};
  in.costs.sharing = AlphaBeta{3e-5, 1e-10};  // all in one go anyway
  EXPECT_EQ(makeKfacPlan(KfacStrategy::kSpd, in).fusion_ends, (std::vector<int>{4}));
}

TEST(KfacPlan, DirectionsAreSplitWhereTheLinkIsFastEnough) {
  auto in = input({300, 300}, 2);
  in.precondition = {4e-3, 4e-3};
  const KfacPlan split = makeKfacPlan(KfacStrategy::kSpd, in);
  EXPECT_TRUE(split.split_directions);  // 4 ms saved; two broadcasts, 5 x 0.2 + 0.36 ms
  EXPECT_DOUBLE_EQ(predictKfac(split, in).precondition, 4e-3);
  EXPECT_DOUBLE_EQ(predictKfac(split, in).gradients, 2e-4 + 0.5e-9 * 2 * 360000);
  EXPECT_FALSE(makeKfacPlan(KfacStrategy::kDkfac, in).split_directions);
  EXPECT_FALSE(makeKfacPlan(KfacStrategy::kMemOpt, in).split_directions);  // nothing is done by all
  EXPECT_DOUBLE_EQ(predictKfac(makeKfacPlan(KfacStrategy::kMemOpt, in), in).precondition, 4e-3);
  in.costs.broadcast.beta = 4.1e-9;  // 1 + 2.95 ms
  EXPECT_TRUE(makeKfacPlan(KfacStrategy::kSpd, in).split_directions);
  in.costs.broadcast.beta = 4.3e-9;  // 1 + 3.1 ms
  EXPECT_FALSE(makeKfacPlan(KfacStrategy::kSpd, in).split_directions);
  in.precondition = {1};
  EXPECT_THROW_MESSAGE(makeKfacPlan(KfacStrategy::kSpd, in), std::invalid_argument, "precondition times = 1");
}

TEST(KfacPlan, RanksThatShareMemorySplitSmallDirections) {
  auto in = input({300, 300}, 2);
  in.precondition = {4e-4, 4e-4};
  EXPECT_FALSE(makeKfacPlan(KfacStrategy::kSpd, in).split_directions);  // 0.4 ms saved; 5 x 0.2 + 0.36 ms
  in.costs.sharing = AlphaBeta{3e-5, 1e-10};
  const KfacPlan split = makeKfacPlan(KfacStrategy::kSpd, in);
  EXPECT_TRUE(split.split_directions);  // 0.03 + 0.072 ms
  in.precondition = {1.1e-4, 1.1e-4};
  EXPECT_TRUE(makeKfacPlan(KfacStrategy::kSpd, in).split_directions);  // 0.11 ms saved
  in.precondition = {1e-4, 1e-4};
  EXPECT_FALSE(makeKfacPlan(KfacStrategy::kSpd, in).split_directions);
  EXPECT_DOUBLE_EQ(predictKfac(split, in).gradients, 3e-5 + 1e-10 * 2 * 360000);
  // Directions of one rank alone go the same way, all together.
  const KfacPlan alone = makeKfacPlan(KfacStrategy::kMemOpt, in);
  EXPECT_DOUBLE_EQ(predictKfac(alone, in).gradients, 3e-5 + 1e-10 * 2 * 360000);
  // And so do factors, whatever buckets messages would leave in, and inverses.
  std::size_t factor_bytes = 0;
  std::size_t inverse_bytes = 0;
  for (const FactorTask& task : in.tasks) {
    factor_bytes += task.factor_bytes;
    inverse_bytes += task.inverse_bytes;
  }
  EXPECT_DOUBLE_EQ(predictKfac(alone, in).exchange, in.costs.all_reduce.seconds(factor_bytes));
  EXPECT_EQ(predictKfac(alone, in).distribute, 0);
  const KfacPlan everyone = makeKfacPlan(KfacStrategy::kCommOpt, in);
  EXPECT_DOUBLE_EQ(predictKfac(everyone, in).distribute, 3e-5 + 1e-10 * static_cast<double>(inverse_bytes));
  EXPECT_EQ(predictKfac(makeKfacPlan(KfacStrategy::kDp, in), in).exchange, 0);
}

TEST(KfacPlan, BadArguments) {
  auto in = input({4}, 0);
  EXPECT_THROW_MESSAGE(makeKfacPlan(KfacStrategy::kSpd, in), std::invalid_argument, "ranks = 0");
  in = input({4}, 2);
  in.worker_fraction = 0;
  EXPECT_THROW_MESSAGE(makeKfacPlan(KfacStrategy::kSpd, in), std::invalid_argument, "worker_fraction = 0");
  in = input({4}, 2);
  in.tasks[0].layer = 7;
  EXPECT_THROW(makeKfacPlan(KfacStrategy::kSpd, in), std::out_of_range);
}

}  // namespace
}  // namespace torchext::core
