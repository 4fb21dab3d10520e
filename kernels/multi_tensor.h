// checkedOffsets() checks the arguments of multi_tensor_flatten and multi_tensor_average_, on every device.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torchext::kernels {

// Which side is written. Written tensors may not share memory with each other, read ones may.
enum class Direction { kIntoFlat, kIntoTensors };

// Throws c10::TypeError or c10::ValueError, naming the argument and the values, unless the operator can run; touches no
// element. Returns the start of each tensor in flat, then flat's size: tensors.size() + 1 numbers.
std::vector<std::int64_t> checkedOffsets(const char* op, at::TensorList tensors, const at::Tensor& flat,
                                         c10::DeviceType device, Direction direction);

}  // namespace torchext::kernels
