// LinkCalibration measures the same sizes on all ranks, stays within its time, and ends where a rank is lost.
#include "c10d/transport/link_calibration.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "c10d/transport/shard_exchange.h"
#include "kit/ranks_as_threads.h"

namespace torchext {
namespace {

using kit::FakeNetwork;
using std::chrono::seconds;

constexpr int kCalibrationTag = 100;

class LinkCalibrationTest : public kit::RanksTest {
 protected:
  // What each rank measures, over messages and collectives of a fake network.
  std::vector<LinkMeasurement> measure(FakeNetwork& network, int ranks, double max_seconds,
                                       std::vector<std::string>* errors = nullptr) {
    std::vector<LinkMeasurement> results(static_cast<std::size_t>(ranks));
    onRanks(ranks, [&](int rank) {
      const auto backend = network.connect(rank);
      const PointToPoint transport = transportOf(backend);
      std::vector<LinkCalibration::Shards> shards;
      shards.push_back({"", std::make_unique<ShardExchange>(transport, kCalibrationTag)});
      LinkCalibration calibration(backend, c10::kCPU, transport, kCalibrationTag + 2, std::move(shards), max_seconds);
      const auto place = static_cast<std::size_t>(rank);
      const std::string error = kit::errorOf([&] { results[place] = calibration.run(); });
      if (errors != nullptr) {
        errors->at(place) = error;
        return;
      }
      EXPECT_EQ(error, "") << "on rank " << rank;
    });
    return results;
  }
};

TEST_F(LinkCalibrationTest, AllRanksHaveTheSameTables) {
  const auto network = std::make_shared<FakeNetwork>(3);
  const auto results = measure(*network, 3, 0.2);
  const LinkMeasurement& first = results.front();
  std::vector<std::string> names;
  for (const LinkTable& table : first.tables) {
    names.push_back(table.operation);
    ASSERT_GE(table.bytes.size(), 2U);
    EXPECT_TRUE(std::is_sorted(table.bytes.begin(), table.bytes.end()));
    EXPECT_EQ(table.seconds.size(), table.bytes.size());
    EXPECT_GT(*std::min_element(table.seconds.begin(), table.seconds.end()), 0.0);
    EXPECT_GE(table.spread, 0.0);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"all_reduce", "reduce_scatter", "all_gather", "p2p", "rows"}));
  EXPECT_EQ(first.tables[0].bytes.front(), 4092);  // of equal chunks
  EXPECT_EQ(first.tables[4].bytes.front(), 1364);  // of one rank
  EXPECT_EQ(first.host_of, (std::vector<int>{0, 0, 0}));
  EXPECT_GT(first.copy_bytes_per_second, 0.0);
  EXPECT_GT(first.operations_per_second, 0.0);
  for (const LinkMeasurement& other : results) {
    for (std::size_t i = 0; i < first.tables.size(); ++i) {
      EXPECT_EQ(other.tables[i].bytes, first.tables[i].bytes);
      EXPECT_EQ(other.tables[i].seconds, first.tables[i].seconds);
    }
  }
}

TEST_F(LinkCalibrationTest, TwoSizesAreMeasuredWhereThereIsNoTime) {
  const auto network = std::make_shared<FakeNetwork>(2);
  const auto results = measure(*network, 2, 0.0);
  for (const LinkTable& table : results.front().tables) {
    EXPECT_EQ(table.bytes.size(), 2U) << table.operation;
  }
}

TEST_F(LinkCalibrationTest, ALostRankEndsIt) {
  const auto network = std::make_shared<FakeNetwork>(2, seconds(10));
  network->afterSends(1, 20, [&] { network->close(1); });
  std::vector<std::string> errors(2);
  measure(*network, 2, 5.0, &errors);
  EXPECT_NE(errors[0], "");
  EXPECT_NE(errors[1], "");
}

}  // namespace
}  // namespace torchext
