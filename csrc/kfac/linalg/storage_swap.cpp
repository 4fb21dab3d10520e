#include "kfac/linalg/storage_swap.h"

#include <utility>

#include <c10/core/CPUAllocator.h>

namespace torchext {
namespace {

// An array of NumPy counts as another tensor: it keeps one alive.
bool ownsItsMemory(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided || !tensor.is_contiguous() || tensor.storage_offset() != 0) {
    return false;
  }
  const c10::Storage& storage = tensor.storage();
  return storage.use_count() == 1 && storage.nbytes() == tensor.nbytes() &&
         storage.data_ptr().get_deleter() == c10::GetCPUAllocator()->raw_deleter();
}

}  // namespace

bool swapStorage(const at::Tensor& one, const at::Tensor& other) {
  if (!ownsItsMemory(one) || !ownsItsMemory(other) || one.scalar_type() != other.scalar_type() ||
      one.sizes() != other.sizes()) {
    return false;
  }
  c10::StorageImpl& first = *one.storage().unsafeGetStorageImpl();
  c10::StorageImpl& second = *other.storage().unsafeGetStorageImpl();
  second.set_data_ptr(first.set_data_ptr(second.set_data_ptr(c10::DataPtr())));
  return true;
}

}  // namespace torchext
