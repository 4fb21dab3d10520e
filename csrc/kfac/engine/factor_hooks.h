// FactorHooks feeds what modules read, and the gradients at their outputs, to factors and to directions of rows.
//
// The path of the data. A module's forward hook calls forward(). That only puts a C++ hook on the node of the graph
// which multiplies the weight (weight_use.h). When the backward pass has called that node with a gradient, backward()
// has both factors' sums made. It needs no Python, no copies of inputs and no synchronisation. Whatever hooks have
// changed, the node has been given what the weight's gradient is made of. A forward pass that is never differentiated
// leaves no trace, and a checkpointed one is seen once.
//
// When the sums are made. With a group, and in steps that send no factors, backward() only keeps its two tensors, up to
// 16 MiB; what is beyond is summed at once. The sums are made when the backward pass has ended. DDP's all-reduces are
// on their way then, and waited for afterwards. On an accelerator all is summed at once, on the streams where the hooks
// run.
//
// Threads: forward() where the module runs; backward() in autograd's thread, under the engine's lock, which it takes.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include "kfac/comm/kfac_context.h"
#include "kfac/factors/factor_exchange.h"
#include "kfac/precondition/gradient_preconditioner.h"

namespace torchext {

class FactorHooks {
 public:
  // All of them outlive this.
  FactorHooks(KfacContext& context, FactorExchange& factors, GradientPreconditioner& gradients)
      : context_(context), factors_(factors), gradients_(gradients) {}

  // As KfacEngine::forward(). self: this object, with all that it uses; hooks end with it.
  bool forward(int layer, const at::Tensor& input, const std::vector<at::Tensor>& outputs,
               const std::shared_ptr<FactorHooks>& self);
  // Whether factors have had a call since the last step; the same on all ranks, even where a batch is empty.
  bool seenBackward() const { return seen_backward_; }
  // Whatever the step comes to, nothing is left that a later call would have to end.
  void takeStep() { seen_backward_ = false; }
  // Makes the sums that were put off.
  void addDeferred();
  void forgetDeferred();
  // Whatever has become of the step.
  void endStep();

 private:
  struct Deferred {
    int layer = 0;
    at::Tensor input;
    at::Tensor gradient;
    int backward_pass = 0;
  };
  void backward(int layer, const at::Tensor& input, const at::Tensor& gradient, int pass,
                const std::shared_ptr<FactorHooks>& self);
  bool defer(int layer, const at::Tensor& input, const at::Tensor& gradient, int backward_pass);
  void callAtEndOfPass(const std::shared_ptr<FactorHooks>& self);
  bool onFirstStream();

  KfacContext& context_;
  FactorExchange& factors_;
  GradientPreconditioner& gradients_;
  std::vector<Deferred> deferred_;
  std::size_t deferred_bytes_ = 0;
  int calling_pass_ = -1;              // the backward pass whose end is waited for
  std::optional<c10::Stream> stream_;  // of the first hook of a step, on an accelerator
  bool several_streams_ = false;       // later ones of the step ran on others, too
  bool seen_backward_ = false;
};

}  // namespace torchext
