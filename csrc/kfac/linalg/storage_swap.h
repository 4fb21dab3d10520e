// Two tensors change places in memory: a copy that costs nothing.
#pragma once

#include <ATen/ATen.h>

namespace torchext {

// Afterwards each has the values of the other. Only where nobody can tell that from a copy: each tensor is contiguous
// and all of a storage of torch's own CPU memory, which no other tensor shares and no array was made of. False: nothing
// was done.
bool swapStorage(const at::Tensor& one, const at::Tensor& other);

}  // namespace torchext
