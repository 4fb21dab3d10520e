// SufficientFactors averages the gradients of Linear and Embedding layers by the rows that they are made of: sufficient
// factors (Zhang et al., "Poseidon", USENIX ATC 2017), an exact way of data-parallel training beside DDP's all-reduce.
//
// What a row is, and what gradients rows make, factor_layer.h says. With few rows these are far fewer bytes than the
// gradient: of n ranks with K rows each, K* = 2MN/(n(M + N)) is where a Linear layer of M x N has as many, and
// K* = 2VDe/(n(De + 8)) an Embedding of V x D with e bytes a number.
//
//   expect()          a forward pass of the model begins: whether its backward pass averages
//   countRows()       a layer is called in it
//   backwardBegins()  the backward pass begins; keep() says so, too
//   keep()            the backward pass has come to a call of a layer. A message leaves with its last expected row
//   endPass()         autograd has done everything else: the rest leaves, and every rank writes the same gradients
//
// What .grad holds. After a pass that averages: 1/n of the gradient of the rows of all ranks in the order of ranks, the
// same bits everywhere, added to what was there. After a pass in no_sync(): this rank's own sum, as with DDP. The rows
// of such passes are sent by the next pass that averages, if .grad is still what was written, and dropped if it is gone
// (zero_grad). A layer that nobody has called keeps its .grad.
//
// When a layer goes by all-reduce instead, in one step and on all ranks, because one rank says so in its message: it
// has more rows than places, or its .grad was changed or not empty before passes in no_sync().
//
// A pass that raises. The next forward pass tells the other ranks, for which this one's rows are missing. Their
// backward pass raises, and the step after it is right everywhere.
//
// Waits. Only endPass() and, after a pass that raised, expect() block, for at most the group's timeout. A failure of
// the group ends the wait with its reason. What a signal's handler raises ends it at once, with the step's gradients
// not complete; the next expect() takes the step to its end for the other ranks' sake. No lock is held meanwhile: other
// threads can ask for stats(), end the group, or wait in their own call until this one is over.
//
// Threads: expect() and countRows() where the model runs, the rest on autograd's thread; all without the interpreter
// lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include <ATen/ATen.h>

#include "c10d/backend/attachable_backend.h"
#include "c10d/transport/row_exchange.h"
#include "ddp/factors/factor_layer.h"
#include "ddp/factors/row_waits.h"
#include "ddp/factors/yielding_mutex.h"

namespace torchext {

class SufficientFactors : public std::enable_shared_from_this<SufficientFactors> {
  using Lock = YieldingMutex::Lock;

 public:
  struct Stats {
    std::int64_t steps = 0;       // that have averaged
    std::int64_t early = 0;       // messages that left before the end of their pass
    std::int64_t reductions = 0;  // of a layer's gradient, by all-reduce
    std::size_t row_bytes = 0;    // memory for rows
  };

  // Collective: all ranks must agree on the layers. These are in the order of the backward pass.
  SufficientFactors(c10::intrusive_ptr<AttachableBackend> group, std::vector<FactorLayer> layers);
  ~SufficientFactors();
  SufficientFactors(const SufficientFactors&) = delete;
  SufficientFactors& operator=(const SufficientFactors&) = delete;

  void expect(bool averages);
  void countRows(std::size_t layer, std::int64_t rows);
  void backwardBegins();
  // number: of the layer. input: [..., inputs], or indices [...]; gradient: [..., outputs] of that call.
  void keep(std::size_t number, const at::Tensor& input, const at::Tensor& gradient);
  void endPass();

  Stats stats() const {
    const Lock lock = mutex_.look();
    return stats_;
  }
  bool inForkedChild() const { return group_->health()->inForkedChild(); }

 private:
  using Message = std::shared_ptr<RowExchange::Message>;
  struct Layer {
    FactorLayer spec;
    std::int64_t expected = 0;      // rows, of calls in forward passes since the last backward pass
    std::vector<FactorRows> calls;  // of this pass
    std::int64_t called = 0;        // rows in them
    // Passes in no_sync() have written .grad, which is this version of `written`. Undefined: none have.
    at::Tensor written;
    std::uint32_t version = 0;
  };
  // How far the end of a step has come, as a signal may end a wait anywhere in it.
  struct Settling {
    std::vector<std::shared_future<void>> arrivals;  // [message that has left]
    std::size_t taken = 0;                           // messages
    std::set<std::size_t> reductions;                // layers that are yet to go by all-reduce
    std::optional<int> abandoned_by;                 // a rank
    std::shared_future<void> sent;
  };

  Lock enter();
  void begin();
  void checkWritten(std::size_t number);
  bool complete(int layer) const;
  void endLocalPass();
  void settle(Lock& lock, bool writes);
  void take(const RowExchange::Message& message, bool writes);
  void reduce(Lock& lock, std::size_t number, bool writes);
  void forgetPass();
  RowExchange& rows();
  void letGo(const std::shared_ptr<RowWaits>& waits);

  const c10::intrusive_ptr<AttachableBackend> group_;
  mutable YieldingMutex mutex_;  // guards what follows
  std::vector<Layer> layers_;
  std::shared_ptr<RowWaits> waits_;   // null: the group has ended
  std::vector<Message> left_;         // in this step
  std::optional<Settling> settling_;  // all of them have left
  bool averages_ = false;             // the coming pass, or the one under way
  bool begun_ = false;                // a pass is under way, or has raised
  bool ending_ = false;               // its end is queued
  Stats stats_;
  std::uint64_t shutdown_callback_ = 0;
};

}  // namespace torchext
