// GradientHooks: tells when the gradient of each parameter will be and has been accumulated, during the backward pass.
//
// The hooks sit on autograd's gradient accumulators, behind those of DDP's reducer: finer than its buckets, which are
// ready only when their last gradient is. In C++, without the GIL.
//
// Threads: the callback runs on autograd's thread. Registration and removal must not run during a backward pass.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

namespace torchext {

class GradientHooks {
 public:
  using Callback = std::function<void(std::size_t)>;

  // before(i): parameters[i].grad() is about to be added to; after(i): it holds what this backward pass has added; i of
  // those that require a gradient. An exception of either ends the backward pass.
  GradientHooks(const std::vector<at::Tensor>& parameters, Callback before, Callback after);
  ~GradientHooks() { remove(); }
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  void remove();

 private:
  // A smart pointer whose kind differs between versions of torch. Held: a parameter knows its accumulator weakly.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  std::vector<std::pair<Accumulator, std::uintptr_t>> hooks_;
  std::shared_ptr<Callback> before_;  // autograd cannot take such a hook off: it looks here, weakly
};

}  // namespace torchext
