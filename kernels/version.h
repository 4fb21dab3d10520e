// A tensor saved for a backward pass and then overwritten must be noticed there: that is what its version counts. What
// writes through raw pointers counts it up itself.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchext::kernels {

inline void bumpVersion(const at::Tensor& tensor) {
  if (!tensor.is_inference()) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace torchext::kernels
