// HopExchange averages a model with its neighbours' iteration by iteration, and skips iterations where it is late.
#include "ddp/hop/hop_exchange.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <barrier>
#include <string>
#include <thread>
#include <vector>

#include "hop_ranks.h"

namespace torchext {
namespace {

using core::GraphKind;
using core::HopMode;
using kit::errorOf;
using kit::has;
using kit::World;
using std::chrono::milliseconds;

// Of torchext._kernels, which is not linked here.
void flattenByTorch(at::TensorList tensors, const at::Tensor& flat) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : tensors) {
    parts.push_back(tensor.reshape({-1}));
  }
  at::Tensor(flat).copy_(at::cat(parts));
}

TORCH_LIBRARY(torchext, library) {
  library.def("multi_tensor_flatten(Tensor[] tensors, Tensor(a!) flat) -> ()");
  library.impl("multi_tensor_flatten", c10::DispatchKey::CPU, TORCH_FN(flattenByTorch));
}

// A model of one parameter, all of whose elements are the rank's number at first, and a parameter that stays 0.
struct Worker {
  Worker(ProcessGroupHop& group, int rank, const HopMode& mode)
      : weight(at::full({5}, rank, at::kDouble)),
        still(at::zeros({3}, at::kFloat)),
        model({weight, still}, {}),
        tensors({weight, still}, {}),
        exchange(kit::attachable(group), model, tensors, kit::hopSetup(group, GraphKind::kFull, mode, model.bytes())) {}

  double value() const { return weight[0].item<double>(); }

  // One iteration whose step adds this; returns how many were skipped behind it.
  std::int64_t iterate(double added) {
    weight.add_(added);
    exchange.publish();
    exchange.average();
    const std::int64_t skipped = exchange.advance();
    exchange.enter();
    return skipped;
  }

  at::Tensor weight;
  at::Tensor still;
  HopModel model;
  TensorsInPlace tensors;
  HopExchange exchange;
};

class HopExchangeTest : public kit::HopRanksTest {
 protected:
  // body(worker, rank) between an exchange's start and the drain that ends its training.
  template <class Body>
  void onWorkers(const World& world, const HopMode& mode, const Body& body) {
    onHopGroups(world, [&](ProcessGroupHop& group, int rank) {
      const at::NoGradGuard no_grad;
      Worker worker(group, rank, mode);
      body(worker, rank);
      EXPECT_TRUE(worker.exchange.drain(true));
      worker.exchange.stop();
    });
  }
};

TEST_F(HopExchangeTest, EveryIterationEndsWithTheAverage) {
  const World world(3);
  onWorkers(world, {}, [&](Worker& worker, int rank) {
    EXPECT_FALSE(worker.exchange.isPublished());
    for (int k = 1; k <= 20; ++k) {
      EXPECT_EQ(worker.iterate(rank), 0);
      EXPECT_NEAR(worker.value(), 1 + k, 1e-9);
      EXPECT_EQ(worker.still.abs().max().item<float>(), 0);
    }
    const HopStats stats = worker.exchange.stats();
    EXPECT_EQ(stats.averages, 20);
    EXPECT_EQ(stats.skipped, 0);
    EXPECT_GT(stats.copy_ms, 0);
  });
}

TEST_F(HopExchangeTest, WhatIsWrittenUnderWayStays) {
  const World world(2);
  onWorkers(world, {}, [&](Worker& worker, int rank) {
    worker.exchange.publish();
    EXPECT_TRUE(worker.exchange.isPublished());
    if (rank == 0) {
      worker.weight.fill_(100);
    }
    worker.exchange.average();
    EXPECT_FALSE(worker.exchange.isPublished());
    EXPECT_NEAR(worker.value(), rank == 0 ? 100 : 0.5, 1e-9);
    worker.exchange.advance();
    worker.exchange.enter();
  });
}

TEST_F(HopExchangeTest, AWorkerThatIsLateSkipsIterations) {
  constexpr std::int64_t kIterations = 40;
  const World world(3);
  const HopMode mode{.max_iteration_gap = 4, .backup_workers = 1, .max_jump = 3};
  onWorkers(world, mode, [&](Worker& worker, int rank) {
    std::int64_t steps = 0;
    std::int64_t skipped = 0;
    while (steps + skipped < kIterations) {
      if (rank == 2) {
        std::this_thread::sleep_for(milliseconds(10));
      }
      skipped += worker.iterate(0);
      ++steps;
    }
    EXPECT_EQ(worker.exchange.stats().skipped, skipped);
    if (rank == 2) {
      EXPECT_GT(skipped, 0);
    }
    EXPECT_GE(worker.value(), 0);
    EXPECT_LE(worker.value(), 2);
  });
}

TEST_F(HopExchangeTest, ASessionBeginsAnewWhereAllHaveMet) {
  const World world(3);
  std::barrier<> met(3);
  onWorkers(world, {}, [&](Worker& worker, int rank) {
    for (int k = 0; k < 5 + rank; ++k) {  // those that are still here go on with each other
      worker.iterate(0);
    }
    worker.exchange.publish();
    EXPECT_TRUE(worker.exchange.drain(false));
    EXPECT_FALSE(worker.exchange.isPublished());
    met.arrive_and_wait();  // as in the collective that follows a drain
    worker.weight.fill_(rank);
    worker.iterate(0);
    EXPECT_NEAR(worker.value(), 1, 1e-9);
  });
}

TEST_F(HopExchangeTest, ADrainThatGivesUpKeepsWhatIsPublished) {
  const World world(2);
  std::barrier<> gave_up(2);
  onWorkers(world, {}, [&](Worker& worker, int rank) {
    if (rank == 0) {
      worker.exchange.publish();
      EXPECT_FALSE(worker.exchange.drain(true, milliseconds(50)));
      EXPECT_TRUE(worker.exchange.isPublished());
    }
    gave_up.arrive_and_wait();
  });
}

TEST_F(HopExchangeTest, ADeadNeighbourEndsTheAverageAndIsNamed) {
  const World world(2);
  std::barrier<> started(2);
  onHopGroups(world, [&](ProcessGroupHop& group, int rank) {
    const at::NoGradGuard no_grad;
    Worker worker(group, rank, {});
    worker.iterate(0);
    started.arrive_and_wait();
    if (rank == 1) {
      world.kill(1);
      return;
    }
    const std::string error = errorOf([&] { worker.iterate(0); });
    EXPECT_TRUE(has(error, "rank 1")) << error;
    EXPECT_EQ(errorOf([&] { worker.exchange.checkUsable(); }), error);
  });
}

}  // namespace
}  // namespace torchext
