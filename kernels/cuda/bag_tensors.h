// bag_tensors turns the operators' tensors into what the CUDA kernels of the embedding bag see: checks, views, memory.
//
// Nothing here waits for the device but DeviceBatch::requireGood.
#pragma once

#include <initializer_list>
#include <optional>

#include <ATen/core/Tensor.h>

#include "kernels/adaptive_bag.h"
#include "kernels/cuda/adaptive_bag_launch.h"
#include "kernels/cuda/device_scope.h"

namespace torchext::kernels {

using OptionalTensor = std::optional<at::Tensor>;

// c10::ValueError unless tensor is on `device`.
void checkDevice(const char* op, const char* name, const at::Tensor& tensor, at::Device device);

// The table; c10 errors as on the CPU. whole_rows: for readers, to whom a wholly resident row is one chunk.
cuda::TableView tableView(const char* op, const at::Tensor& pool, const at::Tensor& index, std::int64_t rows,
                          std::int64_t chunks, bool whole_rows);

// Says whether quads of all these arrays can be read at once.
void setAligned(cuda::TableView& table, std::initializer_list<const void*> arrays);

// A batch, kept alive. Errors of shapes and types are thrown when it is made; those of values by requireGood().
class DeviceBatch {
 public:
  DeviceBatch(const char* op, const BagLayout& layout, const at::Tensor& pool, std::int64_t rows);

  const cuda::BatchView& view() const { return view_; }
  // Queues the check of ids and offsets.
  void check(const DeviceScope& scope);
  // Waits for it; throws what the CPU's check throws.
  void requireGood() const;

 private:
  const char* op_;
  BagLayout layout_;
  std::int64_t rows_;
  at::Tensor ids_;
  OptionalTensor offsets_;
  at::Tensor bad_;
  cuda::BatchView view_;
};

// The memory of a backward pass, and the positions of a batch grouped by row in it.
class DeviceRuns {
 public:
  // sizes: bags, dim and sketched, as far as a pass needs them; the rest follows. cells: of the sketch.
  DeviceRuns(const DeviceScope& scope, const cuda::BatchView& batch, const at::Tensor& pool, cuda::WorkspaceSizes sizes,
             std::int64_t cells);

  const cuda::Workspace& space() const { return space_; }

 private:
  at::Tensor memory_;
  cuda::Workspace space_;
};

}  // namespace torchext::kernels
