#include "kfac/engine/kfac_planner.h"

#include <map>
#include <mutex>

#include "kit/kfac_parts.h"

namespace torchext {
namespace {

using kit::FakeCommunicator;
using kit::kRanks;
using kit::Meeting;
using kit::Parts;
using kit::Way;

class KfacPlannerTest : public kit::KfacRanksTest {};

TEST_P(KfacPlannerTest, AllRanksPlanByTheSameCosts) {
  const auto meeting = std::make_shared<Meeting>(kRanks);
  std::mutex mutex;
  std::map<int, core::KfacPlanInput> inputs;
  onRanks(kRanks, [&](int rank) {
    const Parts parts(meeting, rank, GetParam(), kit::exactOptions("auto"));
    const core::KfacPlanInput& input = parts.planner.input();
    EXPECT_EQ(input.ranks, kRanks);
    EXPECT_EQ(input.costs.all_reduce.alpha, FakeCommunicator::kAllReduce.alpha);
    EXPECT_EQ(input.costs.broadcast.beta, FakeCommunicator::kBroadcast.beta);
    // G and A of the second layer, then of the first; triangles of doubles.
    ASSERT_EQ(input.tasks.size(), 4U);
    EXPECT_EQ(input.tasks[0].dim, 2U);
    EXPECT_EQ(input.tasks[3].dim, 3U);
    EXPECT_EQ(input.tasks[3].factor_bytes, 6U * sizeof(double));
    EXPECT_EQ(input.gradient_bytes, (std::vector<std::size_t>{6 * sizeof(double), 4 * sizeof(double)}));
    const std::lock_guard lock(mutex);
    inputs[rank] = input;
  });
  for (const auto& [rank, input] : inputs) {
    EXPECT_EQ(input.costs.inversion.cubic, inputs[0].costs.inversion.cubic) << "rank " << rank;
    EXPECT_EQ(input.costs.inversion.fixed, inputs[0].costs.inversion.fixed) << "rank " << rank;
    EXPECT_EQ(input.precondition, inputs[0].precondition) << "rank " << rank;
  }
}

TEST_P(KfacPlannerTest, APeerThatDiesEndsTheMeasurements) {
  for (const int calls : {1, 3, 6}) {
    const auto meeting = std::make_shared<Meeting>(kRanks);
    meeting->dieAt(1, calls);
    onRanks(kRanks, [&](int rank) {
      const std::string error =
          kit::errorOf([&] { const Parts parts(meeting, rank, GetParam(), kit::exactOptions("spd")); });
      EXPECT_TRUE(kit::has(error, "gone")) << error;
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, KfacPlannerTest, kit::kAllWays, kit::nameOf);

}  // namespace
}  // namespace torchext
