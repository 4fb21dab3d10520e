// FrozenParameters: what nobody trains, and so nobody sends while training: a frozen backbone costs no byte.
//
// It need not be the same everywhere: a teacher that follows each worker's student is written by hand. Where all
// workers meet they compare contents, one hash a tensor, and average what differs with all the rest. Weights of dtypes
// without an average (int8, bool, complex, float8: quantized ones) stay each worker's own.
//
// Threads: one at a time.
#pragma once

#include <vector>

#include <ATen/ATen.h>

#include "c10d/backend/attachable_backend.h"

namespace torchext {

class FrozenParameters {
 public:
  // The model's own tensors, the same shapes and dtypes on all ranks.
  explicit FrozenParameters(const std::vector<at::Tensor>& tensors);

  // Collective. Those that are not the same, bit for bit, on all ranks; the same ones on all ranks.
  std::vector<at::Tensor> differing(AttachableBackend& group) const;

 private:
  std::vector<at::Tensor> tensors_;  // those that have an average
};

}  // namespace torchext
