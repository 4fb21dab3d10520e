#include "ddp/factors/sufficient_factors.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "c10d/backend/process_group_dear.h"
#include "kit/ranks_as_threads.h"

namespace torchext {
namespace {

using kit::errorOf;
using kit::has;
using kit::RanksTest;
using kit::World;

constexpr std::int64_t kInputs = 5;
constexpr std::int64_t kOutputs = 3;
constexpr std::int64_t kPlaces = 4;

// Whole numbers, whose sums are the same in any order.
at::Tensor numbers(std::int64_t rows, std::int64_t width, int seed) {
  return (at::arange(rows * width, at::kDouble) * 7 + seed).remainder(11).sub(5).view({rows, width});
}

struct Rows {
  at::Tensor input;
  at::Tensor gradient;
};

Rows rowsOf(int rank, int step, std::int64_t count) {
  return {numbers(count, kInputs, 3 * rank + step), numbers(count, kOutputs, 5 * rank + 2 * step)};
}

class SufficientFactorsTest : public RanksTest {
 protected:
  // Two layers; the second has a bias. It is what the backward pass comes to first.
  struct Model {
    explicit Model(AttachableBackend& group)
        : first(at::zeros({kOutputs, kInputs}, at::kDouble).requires_grad_()),
          second(at::zeros({kOutputs, kInputs}, at::kDouble).requires_grad_()),
          bias(at::zeros({kOutputs}, at::kDouble).requires_grad_()),
          factors(std::make_shared<SufficientFactors>(
              c10::intrusive_ptr<AttachableBackend>::reclaim_copy(&group),
              std::vector<FactorLayer>{{"second", second, bias, kPlaces}, {"first", first, at::Tensor(), kPlaces}})) {}

    void keep(std::size_t layer, const Rows& rows) const { factors->keep(layer, rows.input, rows.gradient); }
    // A pass in which both layers have these rows.
    void pass(const Rows& rows, bool averages = true) const {
      factors->expect(averages);
      factors->countRows(0, rows.input.size(0));
      factors->countRows(1, rows.input.size(0));
      factors->backwardBegins();
      keep(0, rows);
      keep(1, rows);
      factors->endPass();
    }
    void zeroGrad() const {
      for (const at::Tensor& parameter : {first, second, bias}) {
        parameter.mutable_grad() = at::Tensor();
      }
    }
    void expectGradients(const Rows& all, int ranks) const {
      const at::Tensor gradient = all.gradient / ranks;
      const at::Tensor weight = at::mm(gradient.t(), all.input);
      EXPECT_TRUE(at::allclose(first.grad(), weight, 1e-12)) << first.grad() << weight;
      EXPECT_TRUE(at::allclose(second.grad(), weight, 1e-12)) << second.grad() << weight;
      EXPECT_TRUE(at::allclose(bias.grad(), gradient.sum(0), 1e-12));
    }

    at::Tensor first;
    at::Tensor second;
    at::Tensor bias;
    std::shared_ptr<SufficientFactors> factors;
  };

  static Rows together(const std::vector<Rows>& parts) {
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> gradients;
    for (const Rows& part : parts) {
      inputs.push_back(part.input);
      gradients.push_back(part.gradient);
    }
    return {at::cat(inputs), at::cat(gradients)};
  }
  // body(model, rank) on every rank of a group of dear's.
  template <class Body>
  void onModels(const World& world, const Body& body) {
    onGroups<ProcessGroupDear>(world, ProcessGroupDear::Options(), [&](AttachableBackend& group, int rank) {
      const Model model(group);
      body(model, rank);
    });
  }
};

TEST_F(SufficientFactorsTest, EveryRankWritesTheGradientOfAllRows) {
  for (const int ranks : {1, 2, 4}) {
    const World world(ranks);
    std::vector<at::Tensor> found(static_cast<std::size_t>(ranks));
    onModels(world, [&](const Model& model, int rank) {
      for (int step = 0; step < 3; ++step) {
        const auto count = [step](int of) -> std::int64_t { return (of + step) % (kPlaces + 1); };  // 0 is one of them
        model.zeroGrad();
        model.pass(rowsOf(rank, step, count(rank)));
        std::vector<Rows> all;
        for (int other = 0; other < ranks; ++other) {
          all.push_back(rowsOf(other, step, count(other)));
        }
        if (ranks > 1 || count(0) > 0) {
          model.expectGradients(together(all), ranks);
        }
      }
      EXPECT_EQ(model.factors->stats().steps, 3);
      EXPECT_EQ(model.factors->stats().reductions, 0);
      found[static_cast<std::size_t>(rank)] = model.first.grad();
    });
    for (const at::Tensor& other : found) {
      EXPECT_TRUE(other.equal(found.front()));
    }
  }
}

TEST_F(SufficientFactorsTest, AMessageLeavesWithItsLastRow) {
  const World world(2);
  onModels(world, [&](const Model& model, int rank) {
    model.pass(rowsOf(rank, 0, 2));
    EXPECT_EQ(model.factors->stats().early, 1);  // both layers are small, and in one message
    // A call that no forward pass has announced is of a checkpoint, after which others may come.
    model.factors->expect(true);
    model.keep(0, rowsOf(rank, 1, 2));
    model.keep(1, rowsOf(rank, 1, 2));
    model.factors->endPass();
    EXPECT_EQ(model.factors->stats().early, 1);
    EXPECT_EQ(model.factors->stats().steps, 2);
  });
}

TEST_F(SufficientFactorsTest, GradientsAddUp) {
  const World world(2);
  onModels(world, [&](const Model& model, int rank) {
    model.pass(rowsOf(rank, 0, 2));
    model.pass(rowsOf(rank, 1, 1));
    model.expectGradients(together({rowsOf(0, 0, 2), rowsOf(1, 0, 2), rowsOf(0, 1, 1), rowsOf(1, 1, 1)}), 2);
  });
}

TEST_F(SufficientFactorsTest, TooManyRowsOfOneRankGoByAllReduceOnAll) {
  const World world(3);
  onModels(world, [&](const Model& model, int rank) {
    const auto count = [](int of) -> std::int64_t { return of == 1 ? kPlaces + 2 : 2; };
    model.pass(rowsOf(rank, 0, count(rank)));
    model.expectGradients(together({rowsOf(0, 0, 2), rowsOf(1, 0, count(1)), rowsOf(2, 0, 2)}), 3);
    EXPECT_EQ(model.factors->stats().reductions, 2);
    model.zeroGrad();
    model.pass(rowsOf(rank, 1, 1));
    model.expectGradients(together({rowsOf(0, 1, 1), rowsOf(1, 1, 1), rowsOf(2, 1, 1)}), 3);
    EXPECT_EQ(model.factors->stats().reductions, 2);
  });
}

TEST_F(SufficientFactorsTest, ALayerThatARankDoesNotCall) {
  const World world(2);
  onModels(world, [&](const Model& model, int rank) {
    const Rows rows = rowsOf(rank, 0, 2);
    model.factors->expect(true);
    model.factors->backwardBegins();
    if (rank == 0) {
      model.keep(0, rows);
    }
    model.factors->endPass();
    const Rows used = rowsOf(0, 0, 2);
    EXPECT_TRUE(at::allclose(model.second.grad(), at::mm(used.gradient.t(), used.input) / 2, 1e-12));
    EXPECT_FALSE(model.first.grad().defined());  // which nobody has called
  });
}

TEST_F(SufficientFactorsTest, RowsOfPassesThatDoNotAverageGoWithTheNext) {
  const World world(2);
  onModels(world, [&](const Model& model, int rank) {
    model.pass(rowsOf(rank, 0, 2), /*averages=*/false);
    model.expectGradients(rowsOf(rank, 0, 2), 1);  // this rank's own
    model.pass(rowsOf(rank, 1, 2));
    model.expectGradients(together({rowsOf(0, 0, 2), rowsOf(0, 1, 2), rowsOf(1, 0, 2), rowsOf(1, 1, 2)}), 2);
    EXPECT_EQ(model.factors->stats().reductions, 0);
    // More than there are places for.
    model.zeroGrad();
    model.pass(rowsOf(rank, 2, 3), /*averages=*/false);
    model.pass(rowsOf(rank, 3, 3));
    model.expectGradients(together({rowsOf(0, 2, 3), rowsOf(0, 3, 3), rowsOf(1, 2, 3), rowsOf(1, 3, 3)}), 2);
    EXPECT_EQ(model.factors->stats().reductions, 2);
  });
}

TEST_F(SufficientFactorsTest, WhatIsDroppedOrChangedBetweenPasses) {
  const World world(2);
  onModels(world, [&](const Model& model, int rank) {
    model.pass(rowsOf(rank, 0, 2), /*averages=*/false);
    model.zeroGrad();
    model.pass(rowsOf(rank, 1, 2));
    const Rows all = together({rowsOf(0, 1, 2), rowsOf(1, 1, 2)});
    model.expectGradients(all, 2);
    EXPECT_EQ(model.factors->stats().reductions, 0);
    // One rank halves its own sum in between, as clipping does.
    model.zeroGrad();
    model.pass(rowsOf(rank, 0, 2), /*averages=*/false);
    if (rank == 1) {
      for (const at::Tensor& parameter : {model.first, model.second, model.bias}) {
        parameter.mutable_grad().mul_(0.5);
      }
    }
    model.pass(rowsOf(rank, 1, 2));
    Rows halved = rowsOf(1, 0, 2);
    halved.gradient.mul_(0.5);
    model.expectGradients(together({rowsOf(0, 0, 2), halved, all}), 2);
    EXPECT_EQ(model.factors->stats().reductions, 2);
    // What an earlier step has left is averaged already.
    model.zeroGrad();
    model.pass(rowsOf(rank, 0, 1));
    model.pass(rowsOf(rank, 1, 1), /*averages=*/false);
    model.pass(rowsOf(rank, 2, 1));
    std::vector<Rows> every;
    for (int step = 0; step < 3; ++step) {
      every.push_back(rowsOf(0, step, 1));
      every.push_back(rowsOf(1, step, 1));
    }
    model.expectGradients(together(every), 2);
  });
}

TEST_F(SufficientFactorsTest, APassThatRaisesOnAllRanks) {
  const World world(2);
  onModels(world, [&](const Model& model, int rank) {
    model.factors->expect(true);
    model.keep(0, rowsOf(rank, 0, 2));  // and then something raises
    model.pass(rowsOf(rank, 1, 2));
    model.expectGradients(together({rowsOf(0, 1, 2), rowsOf(1, 1, 2)}), 2);
  });
}

TEST_F(SufficientFactorsTest, APassThatRaisesOnOneRankRaisesOnTheOthers) {
  const World world(3);
  onModels(world, [&](const Model& model, int rank) {
    if (rank == 1) {
      model.factors->expect(true);
      model.keep(0, rowsOf(rank, 0, 2));
    } else {
      const std::string error = errorOf([&] { model.pass(rowsOf(rank, 0, 2)); });
      EXPECT_TRUE(has(error, "the backward pass of rank 1 raised an error")) << error;
    }
    model.zeroGrad();
    model.pass(rowsOf(rank, 1, 2));
    model.expectGradients(together({rowsOf(0, 1, 2), rowsOf(1, 1, 2), rowsOf(2, 1, 2)}), 3);
  });
}

TEST_F(SufficientFactorsTest, ALayerThatComesAfterItsRowsHaveLeft) {
  const World world(2);
  onModels(world, [&](const Model& model, int rank) {
    model.factors->expect(true);
    model.factors->countRows(0, 2);
    model.factors->countRows(1, 2);
    model.keep(0, rowsOf(rank, 0, 2));
    model.keep(1, rowsOf(rank, 0, 2));
    const std::string error = errorOf([&] { model.keep(1, rowsOf(rank, 0, 2)); });
    EXPECT_TRUE(has(error, "layer first came once more")) << error;
  });
}

TEST_F(SufficientFactorsTest, OtherLayersOnAnotherRank) {
  const World world(2);
  onGroups<ProcessGroupDear>(world, ProcessGroupDear::Options(), [&](AttachableBackend& group, int rank) {
    const at::Tensor weight = at::zeros({2, 2 + rank});
    const std::string error = errorOf([&] {
      SufficientFactors(c10::intrusive_ptr<AttachableBackend>::reclaim_copy(&group),
                        {{"layer", weight, at::Tensor(), kPlaces}});
    });
    EXPECT_TRUE(has(error, "layers[0] is layer, Float[2, 2] on rank 0 and layer, Float[2, 3] on rank 1")) << error;
  });
}

TEST_F(SufficientFactorsTest, APeerThatDiesIsNamed) {
  const World world(2);
  onModels(world, [&](const Model& model, int rank) {
    if (rank == 1) {
      world.kill(1);
      return;
    }
    const std::string error = errorOf([&] { model.pass(rowsOf(rank, 0, 2)); });
    EXPECT_TRUE(has(error, "rank 1")) << error;
    const std::string next = errorOf([&] { model.pass(rowsOf(rank, 1, 2)); });
    EXPECT_TRUE(has(next, "rank 1")) << next;
  });
}

}  // namespace
}  // namespace torchext
