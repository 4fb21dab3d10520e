// DeviceScope makes the device and stream of an operator's call current from its construction to its destruction.
//
// A test on machines without a GPU puts a header of this name before this one (tests/cpp/simulated_cuda): its device
// is the CPU, its dispatch key one that is free, and all that stands on this header is the code that it runs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#define TORCHEXT_DEVICE_KEY CUDA  // what the operators are registered for

namespace torchext::kernels {

inline constexpr c10::DeviceType kDeviceType = c10::kCUDA;

class DeviceScope {
 public:
  // tensor is on the device.
  explicit DeviceScope(const at::Tensor& tensor)
      : guard_(tensor.device()), stream_(c10::cuda::getCurrentCUDAStream()) {}

  cudaStream_t stream() const { return stream_; }
  static void check(cudaError_t error) { C10_CUDA_CHECK(error); }
  // Whether a CUDA graph is being recorded, which may not be waited for.
  static bool capturing() {
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }

 private:
  c10::cuda::CUDAGuard guard_;
  c10::cuda::CUDAStream stream_;
};

}  // namespace torchext::kernels
