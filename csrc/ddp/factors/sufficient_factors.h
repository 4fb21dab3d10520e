// SufficientFactors averages the gradients of Linear layers by the rows that they are made of: sufficient factors
// (Zhang et al., "Poseidon", USENIX ATC 2017), an exact way of data-parallel training beside DDP's all-reduce.
//
// The gradient of a weight is G^T A, of a bias the sum of G. Here A is the layer's input and G the gradient at its
// output, one row for each sample. With few rows these are far fewer bytes than the gradient.
//
//   expect()          a forward pass of the model begins: whether its backward pass averages
//   countRows()       a layer is called in it
//   backwardBegins()  the backward pass begins; keep() says so, too
//   keep()            the backward pass has come to a call of a layer. A message leaves with its last expected row
//   endPass()         autograd has done everything else: the rest leaves, and every rank writes the same gradients
//
// What .grad holds. After a pass that averages: (1/n) G^T A over the rows of all ranks in the order of ranks, the same
// bits everywhere, added to what was there. After a pass in no_sync(): this rank's own sum, as with DDP. The rows of
// such passes are sent by the next pass that averages, if .grad is still what was written, and dropped if it is gone
// (zero_grad). A layer that nobody has called keeps its .grad.
//
// When a layer goes by all-reduce instead, in one step and on all ranks, because one rank says so in its message: it
// has more rows than places, or its .grad was changed or not empty before passes in no_sync().
//
// A pass that raises. The next forward pass tells the other ranks, for which this one's rows are missing. Their
// backward pass raises, and the step after it is right everywhere.
//
// Threads: expect() and countRows() where the model runs, the rest on autograd's thread; all without the interpreter
// lock. Only endPass() and, after a pass that raised, expect() block, for at most the group's timeout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "c10d/backend/attachable_backend.h"
#include "c10d/transport/row_exchange.h"

namespace torchext {

struct FactorLayer {
  std::string name;         // of the module
  at::Tensor weight;        // [outputs, inputs], on the CPU
  at::Tensor bias;          // [outputs]; undefined: none
  std::int64_t places = 0;  // for rows of each rank in a step, all its passes in no_sync() among them
};

class SufficientFactors : public std::enable_shared_from_this<SufficientFactors> {
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
  // number: of the layer. input: [..., inputs]; gradient: [..., outputs] of that call.
  void keep(std::size_t number, const at::Tensor& input, const at::Tensor& gradient);
  void endPass();

  Stats stats() const;
  bool inForkedChild() const { return group_->health()->inForkedChild(); }

 private:
  using Message = std::shared_ptr<RowExchange::Message>;
  struct Call {
    at::Tensor input;     // [rows, inputs]
    at::Tensor gradient;  // [rows, outputs]
  };
  struct Layer {
    FactorLayer spec;
    std::int64_t expected = 0;  // rows, of calls in forward passes since the last backward pass
    std::vector<Call> calls;    // of this pass
    std::int64_t called = 0;    // rows in them
    // Passes in no_sync() have written .grad, which is this version of `written`. Undefined: none have.
    at::Tensor written;
    std::uint32_t version = 0;
  };

  void begin();
  void checkWritten(std::size_t number);
  bool complete(int layer) const;
  void endLocalPass();
  void settle(bool writes);
  void writeRows(std::size_t number, const RowExchange::Rows& rows);
  void reduce(std::size_t number, bool writes);
  void write(Layer& layer, const at::Tensor& weight, const at::Tensor& bias);
  Call allCalls(const Layer& layer) const;
  void endStep();
  void forgetCalls();
  RowExchange& rows();

  const c10::intrusive_ptr<AttachableBackend> group_;
  mutable std::mutex mutex_;  // guards what follows
  std::vector<Layer> layers_;
  std::shared_ptr<RowExchange> rows_;  // null: the group has ended
  std::vector<Message> left_;          // in this step
  bool averages_ = false;              // the coming pass, or the one under way
  bool begun_ = false;                 // a pass is under way, or has raised
  bool ending_ = false;
  Stats stats_;
  std::uint64_t shutdown_callback_ = 0;
};

}  // namespace torchext
