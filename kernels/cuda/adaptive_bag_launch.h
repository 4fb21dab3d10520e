// The CUDA side of the adaptive embedding bag: raw pointers and a stream, no torch.
//
// All but sortBytes return once the work is queued on the stream; the memory must stay alive until it has run. A call
// leaves an error of a launch in the returned code; errors of running show up where CUDA shows them. T is float,
// double, Float16 or BFloat16. What each pass does stands in the headers that bag_run.h names.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "kernels/cuda/bag_run.h"

namespace torchext::cuda {

// Sets *bad to 1 if an id or offset is out of range; leaves it alone otherwise.
cudaError_t launchCheck(const BatchView& batch, std::int32_t* bad, cudaStream_t stream);

template <class T>
cudaError_t launchForward(const ForwardView<T>& view, cudaStream_t stream);

template <class T>
cudaError_t launchWeightGradient(const WeightGradientView<T>& view, cudaStream_t stream);

// The memory that sorting `count` keys takes, for Workspace; waits for nothing.
cudaError_t sortBytes(std::int64_t count, std::int64_t largest_key, std::size_t* bytes);

// Groups the positions of a batch by row, in the workspace.
cudaError_t launchGrouping(const BatchView& batch, const Workspace& space, cudaStream_t stream);

// marks: positions x chunks.
cudaError_t launchMarks(const RunsView& runs, const TableView& table, std::int32_t* marks, cudaStream_t stream);

// After launchGrouping in the same workspace, to which view.inverse, partial and grown point.
template <class T>
cudaError_t launchBackward(const BatchView& batch, const BackwardView<T>& view, const Workspace& space,
                           cudaStream_t stream);

// After launchGrouping.
template <class T>
cudaError_t launchRenorm(const RenormView<T>& view, cudaStream_t stream);

// Divides the utilities of `count` chunks by *factor, which becomes what the factor is afterwards.
cudaError_t launchRenormalise(const UtilityView& utility, std::int64_t count, double* factor, cudaStream_t stream);

}  // namespace torchext::cuda
