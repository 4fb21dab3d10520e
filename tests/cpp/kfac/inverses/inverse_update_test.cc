#include "kfac/inverses/inverse_update.h"

#include <barrier>
#include <cmath>
#include <mutex>

#include "kit/kfac_parts.h"

namespace torchext {
namespace {

using kit::kRanks;
using kit::Meeting;
using kit::Parts;
using kit::Way;

class InverseUpdateTest : public kit::KfacRanksTest {};

// (F + pi sqrt(damping))^-1, of the means over ranks of a layer's two factors.
at::Tensor inverseOf(Parts& parts, const at::Tensor& mean, std::size_t factor_index) {
  const auto full = [&](std::size_t i) {
    const FactorLayout& layout = parts.accumulator->layouts()[i];
    return parts.accumulator->unpacked(parts.accumulator->slice(mean, layout), layout).select(0, 0);
  };
  const at::Tensor own = full(factor_index);
  const at::Tensor other = full(factor_index ^ 1U);
  const double pi = std::sqrt(own.trace().item<double>() / static_cast<double>(own.size(0)) /
                              (other.trace().item<double>() / static_cast<double>(other.size(0))));
  return (own + pi * std::sqrt(0.25) * at::eye(own.size(0), at::kDouble)).inverse();
}

class InverseUpdateByStrategy : public kit::KfacRanksTest {
 protected:
  // One update; what all ranks have afterwards is compared with ATen's inverses, and among ranks to the last bit.
  static void check(Way way, const std::string& strategy) {
    const auto meeting = std::make_shared<Meeting>(kRanks);
    std::mutex mutex;
    std::vector<at::Tensor> first(4);
    onRanks(kRanks, [&](int rank) {
      Parts parts(meeting, rank, way, kit::exactOptions(strategy));
      parts.addBatch();
      parts.sendFactors();
      std::vector<int> ready;
      parts.inverses.run([&](int layer) { ready.push_back(layer); });
      if (way != Way::kMessages || strategy == "d-kfac") {
        EXPECT_TRUE(ready.empty());  // all come together
      }
      const at::Tensor mean = parts.factors.mean();
      for (std::size_t i = 0; i < 4; ++i) {
        const bool used = parts.planner.plan().preconditions(rank, parts.accumulator->layouts()[i].layer);
        const FactorInverse& found = parts.inverses.inverses()[i];
        if (!used) {
          continue;
        }
        ASSERT_TRUE(found.defined());
        EXPECT_TRUE(found.matrix.select(0, 0).allclose(inverseOf(parts, mean, i), 1e-9, 1e-12)) << "factor " << i;
        const std::lock_guard lock(mutex);
        if (!first[i].defined()) {
          first[i] = found.matrix.clone();
        }
        EXPECT_TRUE(found.matrix.equal(first[i])) << "factor " << i;
      }
      EXPECT_EQ(parts.context.counters.inverse_updates, 1);
    });
    for (const at::Tensor& matrix : first) {
      EXPECT_TRUE(matrix.defined());
    }
  }
};

TEST_P(InverseUpdateByStrategy, OfACommOptPlanTravelToAll) { check(GetParam(), "comm-opt"); }
TEST_P(InverseUpdateByStrategy, OfAPadPlanNeedTheTracesOfOthers) { check(GetParam(), "pad"); }
TEST_P(InverseUpdateByStrategy, OfAMemOptPlanStayWithTheOwner) { check(GetParam(), "mem-opt"); }
TEST_P(InverseUpdateByStrategy, OfAHybridPlanReachItsWorkers) { check(GetParam(), "hybrid"); }
TEST_P(InverseUpdateByStrategy, OfThePlainPlanAreMadeEverywhere) { check(GetParam(), "d-kfac"); }

// The next update works with inverses of the layers that follow; the old ones stay where an owner dies.
TEST_P(InverseUpdateTest, APeerThatDiesEndsTheUpdate) {
  const auto meeting = std::make_shared<Meeting>(kRanks);
  std::barrier<> sent(kRanks);
  onRanks(kRanks, [&](int rank) {
    Parts parts(meeting, rank, GetParam(), kit::exactOptions("comm-opt"));
    parts.addBatch();
    parts.sendFactors();
    for (std::size_t bucket = 0; bucket < parts.factors.started(); ++bucket) {
      parts.factors.waitForBucket(bucket);
    }
    const int victim = parts.planner.plan().factors[0].owner;
    sent.arrive_and_wait();
    if (rank == victim) {
      meeting->dieAt(victim, 1);
    }
    const std::string error = kit::errorOf([&] { parts.inverses.run([](int /*layer*/) {}); });
    EXPECT_TRUE(kit::has(error, "gone")) << error;
    EXPECT_EQ(parts.context.counters.inverse_updates, 0);
  });
}

TEST_P(InverseUpdateTest, AnAbortEndsTheUpdate) {
  const auto meeting = std::make_shared<Meeting>(kRanks);
  std::barrier<> sent(kRanks);
  onRanks(kRanks, [&](int rank) {
    Parts parts(meeting, rank, GetParam(), kit::exactOptions("comm-opt"));
    parts.addBatch();
    parts.sendFactors();
    sent.arrive_and_wait();
    if (rank == parts.planner.plan().factors[0].owner) {
      meeting->abort();
      return;
    }
    const std::string error = kit::errorOf([&] { parts.inverses.run([](int /*layer*/) {}); });
    EXPECT_TRUE(kit::has(error, "aborted")) << error;
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, InverseUpdateTest, kit::kAllWays, kit::nameOf);
INSTANTIATE_TEST_SUITE_P(Ways, InverseUpdateByStrategy, kit::kAllWays, kit::nameOf);

}  // namespace
}  // namespace torchext
