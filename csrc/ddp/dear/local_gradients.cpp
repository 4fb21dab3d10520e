#include "ddp/dear/local_gradients.h"

#include <c10/util/Exception.h>

namespace torchext {

void LocalGradients::note(std::size_t parameter) {
  const at::Tensor& gradient = parameters_[parameter].grad();
  const bool dense = gradient.defined() && gradient.layout() == at::kStrided;
  memory_[parameter] = dense ? gradient.data_ptr() : nullptr;
}

void LocalGradients::noteAll() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& gradient = parameters_[i].grad();
    memory_[i] = gradient.defined() ? gradient.data_ptr() : nullptr;
  }
}

void LocalGradients::checkStep() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& gradient = parameters_[i].grad();
    if (memory_[i] == nullptr || !gradient.defined() || gradient.data_ptr() != memory_[i]) {
      continue;
    }
    TORCH_CHECK(!gradient.any().item<bool>(), "dear: optimizer.step() has no averaged gradients: that of ", names_[i],
                " is this rank's alone. It was stepped with before, or comes from a backward pass inside no_sync() or "
                "of a forward pass beside DistributedDataParallel's; call optimizer.zero_grad() after each step, and "
                "have the last forward and backward pass before a step outside no_sync(), through the wrapped model");
  }
}

}  // namespace torchext
