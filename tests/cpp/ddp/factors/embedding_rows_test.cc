#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "c10d/backend/process_group_dear.h"
#include "embedding_model.h"
#include "kit/ranks_as_threads.h"

namespace torchext {
namespace {

using kit::errorOf;
using kit::has;
using kit::RanksTest;
using kit::World;

class EmbeddingRowsTest : public RanksTest {
 protected:
  template <class Body>
  void onModels(const World& world, at::ScalarType type, const Body& body) {
    onGroups<ProcessGroupDear>(world, ProcessGroupDear::Options(), [&](AttachableBackend& group, int rank) {
      const EmbeddingModel model(group, type);
      body(model, rank);
    });
  }
  static void expectNear(const at::Tensor& found, const at::Tensor& expected) {
    EXPECT_TRUE(at::allclose(found, expected, 1e-12)) << found << expected;
  }
};

TEST_F(EmbeddingRowsTest, EveryRankAddsTheRowsOfAllRanks) {
  for (const int ranks : {1, 2, 4}) {
    for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
      const World world(ranks);
      std::vector<at::Tensor> found(static_cast<std::size_t>(ranks));
      onModels(world, type, [&](const EmbeddingModel& model, int rank) {
        for (int step = 0; step < 3; ++step) {
          // One rank in a step has an empty batch.
          const auto count = [&](int of) -> std::int64_t { return ranks > 1 && of == step % ranks ? 0 : 3 + of % 3; };
          model.table.mutable_grad() = at::Tensor();
          model.backward(EmbeddingModel::indices(rank, step, count(rank)), rank);
          const EmbeddingModel::Plain plain(type);
          for (int other = 0; other < ranks; ++other) {
            plain.backward(EmbeddingModel::indices(other, step, count(other)), other);
          }
          EXPECT_EQ(model.table.grad().scalar_type(), type);
          if (type == at::kDouble) {
            expectNear(model.table.grad(), plain.mean(ranks));
          } else {
            EXPECT_TRUE(at::allclose(model.table.grad(), plain.mean(ranks), 1e-6));
          }
          EXPECT_EQ(model.table.grad()[EmbeddingModel::kPadding].abs().sum().item<double>(), 0);
        }
        EXPECT_EQ(model.factors->stats().steps, 3);
        EXPECT_EQ(model.factors->stats().reductions, 0);
        found[static_cast<std::size_t>(rank)] = model.table.grad();
      });
      for (const at::Tensor& other : found) {
        EXPECT_TRUE(other.equal(found.front()));
      }
    }
  }
}

TEST_F(EmbeddingRowsTest, RowsOfPassesThatDoNotAverageGoWithTheNext) {
  const World world(2);
  onModels(world, at::kDouble, [](const EmbeddingModel& model, int rank) {
    const EmbeddingModel::Plain own(at::kDouble);
    own.backward(EmbeddingModel::indices(rank, 0, 3), rank);
    model.backward(EmbeddingModel::indices(rank, 0, 3), rank, /*averages=*/false);
    expectNear(model.table.grad(), own.mean(1));
    model.backward(EmbeddingModel::indices(rank, 1, 2), rank);
    const EmbeddingModel::Plain all(at::kDouble);
    for (int other = 0; other < 2; ++other) {
      all.backward(EmbeddingModel::indices(other, 0, 3), other);
      all.backward(EmbeddingModel::indices(other, 1, 2), other);
    }
    expectNear(model.table.grad(), all.mean(2));
    EXPECT_EQ(model.factors->stats().reductions, 0);
  });
}

TEST_F(EmbeddingRowsTest, TooManyRowsOfOneRankGoByAllReduceOnAll) {
  const World world(2);
  onModels(world, at::kDouble, [](const EmbeddingModel& model, int rank) {
    const auto count = [](int of) -> std::int64_t { return of == 1 ? EmbeddingModel::kPlaces + 3 : 2; };
    model.backward(EmbeddingModel::indices(rank, 0, count(rank)), rank);
    const EmbeddingModel::Plain all(at::kDouble);
    for (int other = 0; other < 2; ++other) {
      all.backward(EmbeddingModel::indices(other, 0, count(other)), other);
    }
    expectNear(model.table.grad(), all.mean(2));
    EXPECT_EQ(model.factors->stats().reductions, 1);
  });
}

// Rows of both kinds in one message, where an index begins at any float.
TEST_F(EmbeddingRowsTest, BesideALinearLayer) {
  for (const int ranks : {1, 2}) {
    const World world(ranks);
    onGroups<ProcessGroupDear>(world, ProcessGroupDear::Options(), [&](AttachableBackend& group, int rank) {
      const at::Tensor weight = at::zeros({1, 5}).requires_grad_();
      const at::Tensor table = EmbeddingModel::tableOf(at::kFloat);
      const auto factors = std::make_shared<SufficientFactors>(
          c10::intrusive_ptr<AttachableBackend>::reclaim_copy(&group),
          std::vector<FactorLayer>{{"linear", weight, at::Tensor(), 3},
                                   {"table", table, at::Tensor(), 3, FactorLayer::Kind::kEmbedding}});
      factors->expect(true);
      factors->keep(0, at::ones({1, 5}), at::full({1, 1}, 2.0 + 2 * rank));
      factors->keep(1, at::full({2, 1}, EmbeddingModel::kIndices - 1, at::kLong), at::ones({2, 1, 3}));
      factors->endPass();
      EXPECT_TRUE(weight.grad().equal(at::full({1, 5}, ranks == 1 ? 2.0F : 3.0F))) << weight.grad();
      at::Tensor expected = at::zeros({EmbeddingModel::kIndices, 3});
      expected[EmbeddingModel::kIndices - 1].fill_(2);
      EXPECT_TRUE(table.grad().equal(expected)) << table.grad();
    });
  }
}

TEST_F(EmbeddingRowsTest, RanksDifferInTheKindOfALayer) {
  const World world(2);
  onGroups<ProcessGroupDear>(world, ProcessGroupDear::Options(), [](AttachableBackend& group, int rank) {
    const at::Tensor table = EmbeddingModel::tableOf(at::kFloat);
    const auto kind = rank == 0 ? FactorLayer::Kind::kLinear : FactorLayer::Kind::kEmbedding;
    const std::string error = errorOf([&] {
      SufficientFactors(c10::intrusive_ptr<AttachableBackend>::reclaim_copy(&group),
                        {{"table", table, at::Tensor(), 3, kind}});
    });
    EXPECT_TRUE(has(error, "layers[0] is table, Float[7, 3] on rank 0 and table (embedding, padding -1), Float[7, 3]"))
        << error;
  });
}

}  // namespace
}  // namespace torchext
