#include "ddp/common/attach_agreement.h"

#include <cstddef>
#include <cstdint>
#include <utility>

#include "c10d/transport/hosts_of.h"

namespace torchext {
namespace {

// Dimensions of one element have strides that say nothing.
std::vector<std::int64_t> memoryOrder(const at::Tensor& tensor) {
  std::vector<std::int64_t> strides;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1) {
      strides.push_back(tensor.stride(dim));
    }
  }
  return strides;
}

}  // namespace

AgreementField agreementOf(std::string what, const std::vector<at::Tensor>& tensors,
                           const std::vector<std::string>& names) {
  std::vector<std::string> values;
  values.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    std::string text = c10::str(c10::toString(tensor.scalar_type()), tensor.sizes());
    if (!tensor.is_contiguous()) {
      text += c10::str(" with strides ", c10::IntArrayRef(memoryOrder(tensor)));
    }
    values.push_back(names.empty() ? std::move(text) : c10::str(names[i], ", ", text));
  }
  return {std::move(what), std::move(values)};
}

void agreeOnAttach(AttachableBackend& group, const AgreementFields& fields) {
  agree(agreementGroup(group), "torchext.attach", fields, "all ranks must attach the same model with the same options");
}

std::vector<int> hostsOf(AttachableBackend& group) { return hostsOf(agreementGroup(group)); }

}  // namespace torchext
