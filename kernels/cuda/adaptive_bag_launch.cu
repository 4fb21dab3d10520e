#include "kernels/cuda/adaptive_bag_launch.h"

#include "kernels/cuda/device_run.h"

namespace torchext::cuda {

cudaError_t launchCheck(const BatchView& batch, std::int32_t* bad, cudaStream_t stream) {
  CudaDevice device(stream);
  runCheck(device, batch, bad);
  return device.error();
}

template <class T>
cudaError_t launchForward(const ForwardView<T>& view, cudaStream_t stream) {
  CudaDevice device(stream);
  runForward(device, view);
  return device.error();
}

template <class T>
cudaError_t launchWeightGradient(const WeightGradientView<T>& view, cudaStream_t stream) {
  CudaDevice device(stream);
  runWeightGradient(device, view);
  return device.error();
}

template cudaError_t launchForward(const ForwardView<float>&, cudaStream_t);
template cudaError_t launchForward(const ForwardView<double>&, cudaStream_t);
template cudaError_t launchForward(const ForwardView<Float16>&, cudaStream_t);
template cudaError_t launchForward(const ForwardView<BFloat16>&, cudaStream_t);
template cudaError_t launchWeightGradient(const WeightGradientView<float>&, cudaStream_t);
template cudaError_t launchWeightGradient(const WeightGradientView<double>&, cudaStream_t);
template cudaError_t launchWeightGradient(const WeightGradientView<Float16>&, cudaStream_t);
template cudaError_t launchWeightGradient(const WeightGradientView<BFloat16>&, cudaStream_t);

}  // namespace torchext::cuda
