#include "kfac/comm/delivery.h"

#include "kit/kfac_parts.h"

namespace torchext {
namespace {

using kit::FakeCommunicator;
using kit::kRanks;
using kit::Meeting;
using kit::Way;

class DeliveryTest : public kit::KfacRanksTest {
 protected:
  // Two numbers of each rank, for all others; then one of rank 2, for rank 0.
  struct Buffer {
    explicit Buffer(Communicator& comm) {
      std::vector<Delivery::Parcel> parcels;
      for (int from = 0; from < kRanks; ++from) {
        parcels.push_back({numbers.narrow(0, 2 * from, 2), from, {(from + 1) % kRanks, (from + 2) % kRanks}, from});
      }
      parcels.push_back({numbers.narrow(0, 6, 1), 2, {0}, 3});
      delivery = comm.deliver(std::move(parcels));
    }
    at::Tensor numbers = at::zeros({7}, at::kDouble);
    std::unique_ptr<Delivery> delivery;
  };
};

TEST_P(DeliveryTest, EveryParcelReachesItsReceivers) {
  const auto meeting = std::make_shared<Meeting>(kRanks);
  onRanks(kRanks, [&](int rank) {
    FakeCommunicator comm(meeting, rank, GetParam());
    Buffer buffer(comm);
    for (int round = 1; round <= 2; ++round) {
      buffer.delivery->begin(4);
      buffer.numbers.narrow(0, 2 * rank, 2).fill_(10 * round + rank);
      buffer.delivery->ready(static_cast<std::size_t>(rank));
      if (rank == 2) {
        buffer.numbers[6] = round;
        buffer.delivery->ready(3);
      }
      buffer.delivery->flush();
      const int other = (rank + 1) % kRanks;
      buffer.delivery->wait(static_cast<std::size_t>(other));
      EXPECT_EQ(buffer.numbers[2 * other].item<double>(), 10 * round + other);
      buffer.delivery->finish();
      for (int from = 0; from < kRanks; ++from) {
        EXPECT_EQ(buffer.numbers[2 * from + 1].item<double>(), 10 * round + from);
      }
      if (rank == 0) {
        EXPECT_EQ(buffer.numbers[6].item<double>(), round);
      }
    }
  });
}

TEST_P(DeliveryTest, ARoundMayHaveFewerParcels) {
  const auto meeting = std::make_shared<Meeting>(kRanks);
  onRanks(kRanks, [&](int rank) {
    FakeCommunicator comm(meeting, rank, GetParam());
    Buffer buffer(comm);
    buffer.delivery->begin(1);
    buffer.numbers.fill_(rank + 1);
    for (std::size_t parcel = 0; parcel < 4; ++parcel) {
      if (parcel == static_cast<std::size_t>(rank)) {
        buffer.delivery->ready(parcel);
      }
    }
    buffer.delivery->flush();
    buffer.delivery->finish();
    EXPECT_EQ(buffer.numbers[0].item<double>(), 1);
    EXPECT_EQ(buffer.numbers[2].item<double>(), rank + 1);
  });
}

TEST_P(DeliveryTest, APeerThatDiesEndsTheWait) {
  const auto meeting = std::make_shared<Meeting>(2);
  meeting->dieAt(1, 1);
  onRanks(2, [&](int rank) {
    FakeCommunicator comm(meeting, rank, GetParam());
    const at::Tensor numbers = at::zeros({2}, at::kDouble);
    const std::string error = kit::errorOf([&] {
      const auto delivery = comm.deliver({{numbers.narrow(0, 0, 1), 0, {1}, 0}, {numbers.narrow(0, 1, 1), 1, {0}, 1}});
      delivery->begin(2);
      delivery->ready(static_cast<std::size_t>(rank));
      delivery->flush();
      delivery->finish();
    });
    EXPECT_TRUE(kit::has(error, "gone")) << error;
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, DeliveryTest, kit::kAllWays, kit::nameOf);

}  // namespace
}  // namespace torchext
