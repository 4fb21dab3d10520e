// SliceCopier: copies runs of elements between dense tensors of one element type and one device.
//
// On the CPU each at once, by memcpy. On CUDA they are gathered until flush(), and go with a few kernels for all of
// them instead of one a run.
// Threads: one.
#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torchext {

class SliceCopier {
 public:
  // like: of the element type and on the device of what will be copied.
  explicit SliceCopier(const at::Tensor& like);
  ~SliceCopier();  // all must have been flushed
  SliceCopier(const SliceCopier&) = delete;
  SliceCopier& operator=(const SliceCopier&) = delete;

  // Elements are counted in memory order. `from` is kept alive until flush().
  void copy(const at::Tensor& to, std::size_t to_begin, const at::Tensor& from, std::size_t from_begin,
            std::size_t count);
  void zero(const at::Tensor& to, std::size_t begin, std::size_t count);
  void flush();

 private:
  const bool on_cpu_;
  const std::size_t element_bytes_;
  std::vector<at::Tensor> targets_;
  std::vector<at::Tensor> sources_;
};

}  // namespace torchext
