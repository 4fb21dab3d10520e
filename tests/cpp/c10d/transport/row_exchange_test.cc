#include "c10d/transport/row_exchange.h"

#include <cmath>
#include <latch>
#include <limits>

#include "kit/ranks_as_threads.h"

namespace torchext {
namespace {

using kit::errorOf;
using kit::has;
using kit::RanksTest;
using kit::World;

constexpr int kRowTag = 7;

RowLinks linksOf(const World& world, int rank) {
  const auto backend = world.data->connect(rank);
  return {.rank = rank,
          .ranks = world.size,
          .send =
              [backend](const at::Tensor& rows, int to, int tag) {
                std::vector<at::Tensor> tensors{rows};
                return backend->send(tensors, to, tag);
              },
          .receive =
              [backend](const at::Tensor& rows, int from, int tag) {
                std::vector<at::Tensor> tensors{rows};
                return backend->recv(tensors, from, tag);
              },
          .gather = nullptr};
}

class RowExchangeTest : public RanksTest {
 protected:
  using Message = std::shared_ptr<RowExchange::Message>;
  // Two matrices, 2 x 3 and 1 x 2, with places for two rows of each rank; both are in one message.
  struct Rank {
    explicit Rank(std::optional<RowLinks> links)
        : rows({{.number = 4, .inputs = 3, .outputs = 2, .places = 2},
                {.number = 1, .inputs = 2, .outputs = 1, .places = 2}},
               at::TensorOptions(at::kDouble), std::move(links), kRowTag, "who",
               [this](const Message& message) { left.push_back(message); }) {}
    std::vector<Message> left;
    RowExchange rows;
  };
  // Some zeros, and numbers that tell the rank.
  static at::Tensor numbers(int rank, std::int64_t count, std::int64_t width) {
    const at::Tensor all = at::arange(count * width, at::kDouble).view({count, width});
    return at::where(all.remainder(2).eq(0), at::zeros_like(all), all + 10 * rank);
  }
};

TEST_F(RowExchangeTest, RowsOfAllRanksComeInTheOrderOfRanks) {
  const World world(3);
  onRanks(3, [&](int rank) {
    Rank own(linksOf(world, rank));
    for (int step = 0; step < 2; ++step) {
      const std::int64_t count = rank == 1 ? 1 : 2;  // not alike on all ranks
      own.rows.keep(4, numbers(rank, count, 3), numbers(rank, count, 2));
      own.rows.leave();
      ASSERT_EQ(own.left.size(), 1U);
      EXPECT_EQ(own.left[0]->matrices(), (std::vector<int>{4, 1}));
      own.left[0]->wait();
      const RowExchange::Rows found = own.left[0]->rows(4);
      EXPECT_TRUE(found.inputs.equal(at::cat({numbers(0, 2, 3), numbers(1, 1, 3), numbers(2, 2, 3)})));
      EXPECT_TRUE(found.gradients.equal(at::cat({numbers(0, 2, 2), numbers(1, 1, 2), numbers(2, 2, 2)})));
      EXPECT_FALSE(own.left[0]->rows(1).inputs.defined());  // nobody had any
      own.rows.next();
      own.left.clear();
    }
  });
}

TEST_F(RowExchangeTest, AMessageLeavesWithItsUsualRows) {
  const World world(2);
  onRanks(2, [&](int rank) {
    Rank own(linksOf(world, rank));
    own.rows.expect(4, 2);
    own.rows.expect(1, 1);
    own.rows.keep(4, numbers(rank, 2, 3), numbers(rank, 2, 2));
    EXPECT_TRUE(own.left.empty());
    own.rows.keep(1, numbers(rank, 1, 2), numbers(rank, 1, 1));
    EXPECT_EQ(own.left.size(), 1U);
    own.rows.leave();
    EXPECT_EQ(own.left.size(), 1U);
    own.rows.next();
  });
}

TEST_F(RowExchangeTest, MoreRowsThanPlacesAreKnownToAll) {
  const World world(2);
  onRanks(2, [&](int rank) {
    Rank own(linksOf(world, rank));
    own.rows.keep(4, numbers(rank, 2 + rank, 3), numbers(rank, 2 + rank, 2));
    own.rows.leave();
    own.left[0]->wait();
    EXPECT_FALSE(own.left[0]->rows(4).inputs.defined());
    EXPECT_TRUE(own.left[0]->tooMany(4));
    EXPECT_FALSE(own.left[0]->tooMany(1));
    EXPECT_FALSE(own.left[0]->abandonedBy());
    own.rows.next();
  });
}

TEST_F(RowExchangeTest, AMessageMayLeaveByItsMatrix) {
  const World world(2);
  onRanks(2, [&](int rank) {
    Rank own(linksOf(world, rank));
    own.rows.keep(4, numbers(rank, 2, 3), numbers(rank, 2, 2));
    own.rows.keep(1, numbers(rank, 1, 2), numbers(rank, 1, 1));
    own.rows.forget(4);
    EXPECT_EQ(own.rows.together(1), (std::vector<int>{4, 1}));
    EXPECT_FALSE(own.rows.left(1));
    own.rows.leave(1);
    own.rows.leave(4);  // it has left
    EXPECT_TRUE(own.rows.left(4));
    ASSERT_EQ(own.left.size(), 1U);
    own.left[0]->wait();
    EXPECT_FALSE(own.left[0]->rows(4).inputs.defined());
    EXPECT_TRUE(own.left[0]->rows(1).inputs.equal(at::cat({numbers(0, 1, 2), numbers(1, 1, 2)})));
    own.rows.next();
    EXPECT_FALSE(own.rows.underWay());
  });
}

TEST_F(RowExchangeTest, ARankThatGivesAStepUpSaysSo) {
  const World world(3);
  onRanks(3, [&](int rank) {
    Rank own(linksOf(world, rank));
    own.rows.keep(4, numbers(rank, 1, 3), numbers(rank, 1, 2));
    if (rank == 1) {
      own.rows.abandon();
    } else {
      own.rows.leave();
    }
    own.left[0]->wait();
    EXPECT_EQ(own.left[0]->abandonedBy(), std::optional(1));
    EXPECT_FALSE(own.left[0]->tooMany(4));
    EXPECT_FALSE(own.left[0]->rows(4).inputs.defined());
    own.rows.next();
  });
}

TEST_F(RowExchangeTest, ARankInAnotherStepIsNamed) {
  const World world(2);
  onRanks(2, [&](int rank) {
    const RowLinks links = linksOf(world, rank);
    Rank early(links);
    Rank late(links);
    if (rank == 0) {
      early.rows.leave();
      early.rows.next();
      early.left.clear();
      early.rows.leave();
      const std::string error = errorOf([&] { early.left[0]->wait(); });
      EXPECT_TRUE(has(error, "who: rank 1 has taken 0 steps")) << error;
      return;
    }
    early.rows.leave();
    early.rows.next();
    late.rows.leave();  // its count begins anew
    const std::string error = errorOf([&] { late.left[0]->wait(); });
    EXPECT_TRUE(has(error, "who: rank 0 has taken 1 steps")) << error;
  });
}

TEST_F(RowExchangeTest, ARankThatSendsNoRowsIsNamed) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double count : {1e6, -3.0, std::nan(""), kInfinity}) {
    const World world(2);
    std::latch looked(1);  // until then rank 1 may not close its connections
    onRanks(2, [&](int rank) {
      const RowLinks links = linksOf(world, rank);
      if (rank == 1) {
        // The step, two counts, places for two rows of both matrices.
        const at::Tensor message = at::zeros({1, 1 + 2 + 2 * (3 + 2) + 2 * (2 + 1)}, at::kDouble);
        message[0][2] = count;
        links.send(message, 0, kRowTag)->wait();
        looked.wait();
        return;
      }
      Rank own(links);
      const std::string error = errorOf([&] {
        own.rows.leave();
        own.left[0]->wait();
      });
      looked.count_down();
      EXPECT_TRUE(has(error, "who: what rank 1 has sent is no rows")) << error;
    });
  }
}

TEST_F(RowExchangeTest, ARankAloneSendsNothing) {
  Rank own(std::nullopt);
  own.rows.keep(4, numbers(0, 2, 3), numbers(0, 2, 2));
  EXPECT_FALSE(own.rows.travels());
  own.rows.leave();
  own.left[0]->wait();
  EXPECT_TRUE(own.left[0]->rows(4).inputs.equal(numbers(0, 2, 3)));
  own.rows.next();
}

TEST_F(RowExchangeTest, PartsMayGoInOneCall) {
  RowLinks links{.rank = 1, .ranks = 2, .send = nullptr, .receive = nullptr, .gather = nullptr};
  links.gather = [](const std::vector<at::Tensor>& parts) { parts[0].copy_(parts[1]); };
  Rank own(links);
  own.rows.keep(4, numbers(0, 1, 3), numbers(0, 1, 2));
  EXPECT_TRUE(own.left.empty());
  own.rows.leave();
  own.left[0]->wait();
  EXPECT_TRUE(own.left[0]->rows(4).inputs.equal(at::cat({numbers(0, 1, 3), numbers(0, 1, 3)})));
  own.rows.next();
}

TEST_F(RowExchangeTest, APeerThatDiesEndsTheWait) {
  const World world(2);
  std::latch left(1);  // a message to one that is dead is refused at once
  onRanks(2, [&](int rank) {
    Rank own(linksOf(world, rank));
    if (rank == 1) {
      left.wait();
      world.kill(1);
      return;
    }
    own.rows.leave();
    left.count_down();
    EXPECT_NE(errorOf([&] { own.rows.next(); }), "");
  });
}

}  // namespace
}  // namespace torchext
