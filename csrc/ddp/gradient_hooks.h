// GradientHooks: tells when the gradient of each parameter has been accumulated, during the backward pass.
//
// The hooks sit on autograd's gradient accumulators, behind those of DDP's reducer: finer than its buckets, which are
// ready only when their last gradient is. In C++, without the GIL.
//
// Threads: the callback runs on autograd's thread. Registration and removal must not run during a backward pass.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

namespace torchext {

class GradientHooks {
 public:
  // callback(i): parameters[i].grad() holds what this backward pass has added; i of those that require a gradient.
  // An exception of it ends the backward pass.
  GradientHooks(const std::vector<at::Tensor>& parameters, std::function<void(std::size_t)> callback);
  ~GradientHooks() { remove(); }
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  void remove();

 private:
  // A smart pointer whose kind differs between versions of torch. Held: a parameter knows its accumulator weakly.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  std::vector<std::pair<Accumulator, std::uintptr_t>> hooks_;
};

}  // namespace torchext
