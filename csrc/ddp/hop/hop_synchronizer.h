// HopSynchronizer: trains an attached model with Hop (Luo et al., ASPLOS 2019): every worker exchanges its parameters
// with its neighbours on a communication graph, iteration by iteration, and applies its own gradients.
//
// Orders, at iteration k of worker i, x its parameters, W the graph's weights, u the optimizer's step
//   parallel   after the step before, x_k has gone out and the iteration's compute began; before the step the
//              parameters become temp = sum_j W_ji x_{j,k}, and the optimizer makes x_{k+1} = temp - u(g(x_k)) of it.
//   serial     compute, step: y_k = x_k - u(g(x_k)); y_k goes out, and x_{k+1} = sum_j W_ji y_{j,k} before the next
//              forward, or whoever else reads the parameters.
//   Which models are waited for, how far workers drift apart, and when one skips iterations: core/hop/hop_mode.h.
// Floating-point buffers (BatchNorm statistics) are averaged with the parameters. In the parallel order a forward
// changes them while their neighbours' are on the way; the average is corrected by what it added. What the user writes
// into parameters meanwhile is kept, see TensorsInPlace.
// Skipping happens in afterStep() (serial: before the next forward), see HopExchange. steps() tells.
// Begin: the first model of a session goes out in the first beforeStep(), so that parameters may be loaded after attach
// or after an average.
// synchronize() and averaged(): a worker that comes there first is not waited for by those that still train (sessions,
// hop_mailbox.h); when all have come the exact average is formed by an all-reduce, and a session begins anew.
//
// Threads: all functions are the training thread's; leave() may come from another when training is over.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "c10d/backend/process_group_hop.h"
#include "ddp/common/replica_average.h"
#include "ddp/common/synchronizer.h"
#include "ddp/common/tensors_in_place.h"
#include "ddp/hop/hop_exchange.h"
#include "ddp/hop/hop_model.h"
#include "ddp/hop/hop_stats.h"

namespace torchext {

class HopSynchronizer : public AveragingSynchronizer {
 public:
  // Collective. parameters (those that are trained), buffers, frozen (the other parameters): the model's, in
  // registration order; floating point; the same shapes and options on all ranks (checked: c10::DistBackendError on
  // every rank, naming the first rank that differs and the field).
  HopSynchronizer(c10::intrusive_ptr<ProcessGroupHop> group, const std::vector<at::Tensor>& parameters,
                  const std::vector<at::Tensor>& buffers, const std::vector<at::Tensor>& frozen);
  ~HopSynchronizer() override;

  void gradientsReady() override {}
  void beforeStep() override;
  void afterStep() override;
  void waitTensors(const std::vector<std::int64_t>& tensors) override;
  void waitAll() override;
  void synchronize() override;
  void enterAverage() override;
  void leaveAverage() override;
  void detach() override;
  void leave(std::chrono::milliseconds limit) override;
  bool inForkedChild() const override { return group_->health()->inForkedChild(); }

  // The iteration to be computed next: steps made and iterations skipped, since attach or as set.
  std::int64_t steps() const override { return iteration_; }
  void setSteps(std::int64_t steps) override { iteration_ = steps; }
  void resume(std::int64_t /*own*/, std::int64_t furthest) override { iteration_ = furthest; }

  // Sends the first model of a session now, and not in the first beforeStep(). For workers that begin one at different
  // places of their loops, and first step other models, in which they wait for each other.
  void begin();

  AveragingStats stats() const override;
  HopStats hopStats() const;
  // Largest gap to an in-neighbour that the mode allows this rank: Iter(self) - Iter(neighbour).
  int gapBound() const;

 private:
  void finishIteration(HopExchange& exchange);
  void moveOn(HopExchange& exchange);
  void checkAttached() const;
  void meet(const std::function<void()>& task);
  void drain(bool finally);

  const c10::intrusive_ptr<ProcessGroupHop> group_;
  const core::CommunicationGraph graph_;
  const core::HopMode mode_;
  const bool serial_;
  const HopModel model_;
  TensorsInPlace tensors_;
  ReplicaAverage replica_average_;
  // Null in a group of one, and after leave(), which a signal's handler may call in any wait: who waits in it keeps a
  // copy, and the wait ends with an error.
  std::shared_ptr<HopExchange> exchange_;

  std::int64_t iteration_ = 0;  // since attach
  bool averaged_ = false;       // parallel: the parameters are those of temp
  bool exchanging_ = false;     // serial: the average of this iteration is not formed
  bool meeting_ = false;        // with all others, in synchronize(), averaged() or detach()
  bool detached_ = false;
  std::int64_t steps_made_ = 0;    // without what was skipped
  double consensus_distance_ = 0;  // at the last exact average
  HopStats last_stats_;            // the exchange's, when it is gone
  std::uint64_t shutdown_callback_ = 0;
};

}  // namespace torchext
