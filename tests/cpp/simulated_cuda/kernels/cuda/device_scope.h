// Stands in for the header of this name: the device is the CPU, the operators are registered for a key that is free.
#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>

#define TORCHEXT_DEVICE_KEY PrivateUse1

namespace torchext::kernels {

inline constexpr c10::DeviceType kDeviceType = c10::kCPU;

class DeviceScope {
 public:
  explicit DeviceScope(const at::Tensor& /*tensor*/) {}

  cudaStream_t stream() const { return nullptr; }
  static void check(cudaError_t error) {
    TORCH_CHECK(error == cudaSuccess, "simulated launch: ", static_cast<int>(error));
  }
  static bool capturing() { return false; }
};

}  // namespace torchext::kernels
