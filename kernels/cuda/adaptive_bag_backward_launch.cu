#include <cub/device/device_radix_sort.cuh>

#include "kernels/cuda/adaptive_bag_launch.h"
#include "kernels/cuda/device_run.h"

namespace torchext::cuda {

cudaError_t sortBytes(std::int64_t count, std::int64_t largest_key, std::size_t* bytes) {
  *bytes = 0;
  if (count == 0) {
    return cudaSuccess;
  }
  const std::uint32_t* keys = nullptr;
  const std::int32_t* order = nullptr;
  return cub::DeviceRadixSort::SortPairs(nullptr, *bytes, keys, static_cast<std::uint32_t*>(nullptr), order,
                                         static_cast<std::int32_t*>(nullptr), static_cast<int>(count), 0,
                                         keyBits(largest_key));
}

cudaError_t launchGrouping(const BatchView& batch, const Workspace& space, cudaStream_t stream) {
  CudaDevice device(stream);
  runGrouping(device, batch, space);
  return device.error();
}

cudaError_t launchMarks(const RunsView& runs, const TableView& table, std::int32_t* marks, cudaStream_t stream) {
  CudaDevice device(stream);
  runMarks(device, runs, table, marks);
  return device.error();
}

template <class T>
cudaError_t launchBackward(const BatchView& batch, const BackwardView<T>& view, const Workspace& space,
                           cudaStream_t stream) {
  CudaDevice device(stream);
  runBackward(device, batch, view, space);
  return device.error();
}

template <class T>
cudaError_t launchRenorm(const RenormView<T>& view, cudaStream_t stream) {
  CudaDevice device(stream);
  runRenorm(device, view);
  return device.error();
}

cudaError_t launchRenormalise(const UtilityView& utility, std::int64_t count, double* factor, cudaStream_t stream) {
  CudaDevice device(stream);
  *factor = runRenormalise(device, utility, count, *factor);
  return device.error();
}

template cudaError_t launchBackward(const BatchView&, const BackwardView<float>&, const Workspace&, cudaStream_t);
template cudaError_t launchBackward(const BatchView&, const BackwardView<double>&, const Workspace&, cudaStream_t);
template cudaError_t launchBackward(const BatchView&, const BackwardView<Float16>&, const Workspace&, cudaStream_t);
template cudaError_t launchBackward(const BatchView&, const BackwardView<BFloat16>&, const Workspace&, cudaStream_t);
template cudaError_t launchRenorm(const RenormView<float>&, cudaStream_t);
template cudaError_t launchRenorm(const RenormView<double>&, cudaStream_t);
template cudaError_t launchRenorm(const RenormView<Float16>&, cudaStream_t);
template cudaError_t launchRenorm(const RenormView<BFloat16>&, cudaStream_t);

}  // namespace torchext::cuda
