#include "ddp/dear/slice_copier.h"

#include <cstring>

#include <ATen/ops/_foreach_copy.h>
#include <c10/util/Exception.h>

namespace torchext {
namespace {

std::byte* bytesAt(const at::Tensor& tensor, std::size_t element, std::size_t element_bytes) {
  return static_cast<std::byte*>(tensor.data_ptr()) + element * element_bytes;
}

at::Tensor run(const at::Tensor& tensor, std::size_t begin, std::size_t count) {
  return tensor.as_strided({static_cast<std::int64_t>(count)}, {1},
                           tensor.storage_offset() + static_cast<std::int64_t>(begin));
}

}  // namespace

SliceCopier::SliceCopier(const at::Tensor& like)
    : on_cpu_(like.device().is_cpu()), element_bytes_(like.element_size()) {}

SliceCopier::~SliceCopier() { TORCH_INTERNAL_ASSERT_DEBUG_ONLY(targets_.empty()); }

void SliceCopier::copy(const at::Tensor& to, std::size_t to_begin, const at::Tensor& from, std::size_t from_begin,
                       std::size_t count) {
  if (count == 0) {
    return;
  }
  if (on_cpu_) {
    std::memcpy(bytesAt(to, to_begin, element_bytes_), bytesAt(from, from_begin, element_bytes_),
                count * element_bytes_);
  } else {
    targets_.push_back(run(to, to_begin, count));
    sources_.push_back(run(from, from_begin, count));
  }
}

void SliceCopier::zero(const at::Tensor& to, std::size_t begin, std::size_t count) {
  if (count == 0) {
    return;
  }
  if (on_cpu_) {
    std::memset(bytesAt(to, begin, element_bytes_), 0, count * element_bytes_);
  } else {
    run(to, begin, count).zero_();
  }
}

void SliceCopier::flush() {
  if (!targets_.empty()) {
    at::_foreach_copy_(targets_, sources_);
    targets_.clear();
    sources_.clear();
  }
}

}  // namespace torchext
