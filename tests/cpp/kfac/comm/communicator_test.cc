#include "kfac/comm/communicator.h"

#include "kit/kfac_parts.h"

namespace torchext {
namespace {

using kit::FakeCommunicator;
using kit::kRanks;
using kit::Meeting;
using kit::Way;

class CommunicatorTest : public kit::KfacRanksTest {
 protected:
  // Two numbers of each rank, for all others; then one of rank 2, for rank 0.
  static std::vector<Communicator::Parcel> parcelsOf(const at::Tensor& numbers) {
    std::vector<Communicator::Parcel> parcels;
    for (int from = 0; from < kRanks; ++from) {
      parcels.push_back({numbers.narrow(0, 2 * from, 2), from, {(from + 1) % kRanks, (from + 2) % kRanks}, from});
    }
    parcels.push_back({numbers.narrow(0, 6, 1), 2, {0}, 3});
    return parcels;
  }
};

TEST_P(CommunicatorTest, EveryParcelReachesItsReceivers) {
  const auto meeting = std::make_shared<Meeting>(kRanks);
  onRanks(kRanks, [&](int rank) {
    FakeCommunicator comm(meeting, rank, GetParam());
    const at::Tensor numbers = at::zeros({7}, at::kDouble);
    const auto parcels = parcelsOf(numbers);
    for (int round = 1; round <= 2; ++round) {
      numbers.narrow(0, 2 * rank, 2).fill_(10 * round + rank);
      if (rank == 2) {
        numbers[6] = round;
      }
      comm.bring(parcels);
      for (int from = 0; from < kRanks; ++from) {
        EXPECT_EQ(numbers[2 * from + 1].item<double>(), 10 * round + from);
      }
      if (rank == 0) {
        EXPECT_EQ(numbers[6].item<double>(), round);
      }
    }
  });
}

TEST_P(CommunicatorTest, SomeOfTheParcelsMayTravel) {
  const auto meeting = std::make_shared<Meeting>(kRanks);
  onRanks(kRanks, [&](int rank) {
    FakeCommunicator comm(meeting, rank, GetParam());
    const at::Tensor numbers = at::full({7}, rank + 1, at::kDouble);
    const auto parcels = parcelsOf(numbers);
    comm.bring(Communicator::Parcels(parcels).slice(0, 1));
    EXPECT_EQ(numbers[0].item<double>(), 1);
    EXPECT_EQ(numbers[2].item<double>(), rank + 1);
  });
}

TEST_P(CommunicatorTest, APeerThatDiesEndsTheWait) {
  const auto meeting = std::make_shared<Meeting>(2);
  meeting->dieAt(1, 1);
  onRanks(2, [&](int rank) {
    FakeCommunicator comm(meeting, rank, GetParam());
    const at::Tensor numbers = at::zeros({2}, at::kDouble);
    const std::vector<Communicator::Parcel> parcels{{numbers.narrow(0, 0, 1), 0, {1}, 0},
                                                    {numbers.narrow(0, 1, 1), 1, {0}, 1}};
    const std::string error = kit::errorOf([&] { comm.bring(parcels); });
    EXPECT_TRUE(kit::has(error, "gone")) << error;
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, CommunicatorTest, kit::kAllWays, kit::nameOf);

}  // namespace
}  // namespace torchext
