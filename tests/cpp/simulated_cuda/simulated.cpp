// The CUDA operators of the adaptive embedding bag on a simulated device: their own code from tensors to passes, and
// loops on the host instead of launches. One translation unit, because torch's headers cost most of the time.
#include "csrc/core/embedding/chunk_index.cpp"
#include "csrc/core/embedding/chunk_utility.cpp"
#include "kernels/bag_checks.cpp"
#include "kernels/cuda/adaptive_bag.cpp"
#include "kernels/cuda/adaptive_bag_backward.cpp"
#include "kernels/cuda/adaptive_table.cpp"
#include "kernels/cuda/bag_tensors.cpp"
#include "tests/cpp/kernels/host_device.h"

namespace torchext::cuda {

cudaError_t launchCheck(const BatchView& batch, std::int32_t* bad, cudaStream_t /*stream*/) {
  HostDevice device;
  runCheck(device, batch, bad);
  return cudaSuccess;
}

template <class T>
cudaError_t launchForward(const ForwardView<T>& view, cudaStream_t /*stream*/) {
  HostDevice device;
  runForward(device, view);
  return cudaSuccess;
}

template <class T>
cudaError_t launchWeightGradient(const WeightGradientView<T>& view, cudaStream_t /*stream*/) {
  HostDevice device;
  runWeightGradient(device, view);
  return cudaSuccess;
}

cudaError_t sortBytes(std::int64_t /*count*/, std::int64_t /*largest_key*/, std::size_t* bytes) {
  *bytes = 1;
  return cudaSuccess;
}

cudaError_t launchGrouping(const BatchView& batch, const Workspace& space, cudaStream_t /*stream*/) {
  HostDevice device;
  runGrouping(device, batch, space);
  return cudaSuccess;
}

cudaError_t launchMarks(const RunsView& runs, const TableView& table, std::int32_t* marks, cudaStream_t /*stream*/) {
  HostDevice device;
  runMarks(device, runs, table, marks);
  return cudaSuccess;
}

template <class T>
cudaError_t launchBackward(const BatchView& batch, const BackwardView<T>& view, const Workspace& space,
                           cudaStream_t /*stream*/) {
  HostDevice device;
  runBackward(device, batch, view, space);
  return cudaSuccess;
}

template <class T>
cudaError_t launchRenorm(const RenormView<T>& view, cudaStream_t /*stream*/) {
  HostDevice device;
  runRenorm(device, view);
  return cudaSuccess;
}

cudaError_t launchRenormalise(const UtilityView& utility, std::int64_t count, double* factor, cudaStream_t /*stream*/) {
  HostDevice device;
  *factor = runRenormalise(device, utility, count, *factor);
  return cudaSuccess;
}

}  // namespace torchext::cuda
