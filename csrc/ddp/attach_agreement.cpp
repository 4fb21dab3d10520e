#include "ddp/attach_agreement.h"

#include <algorithm>
#include <string>

#include "core/host_identity.h"

namespace torchext {
namespace {

constexpr std::uint64_t kFnvBasis = 1469598103934665603ULL;

std::int64_t hash(std::uint64_t seed, const std::string& text) {
  for (const char c : text) {
    seed = (seed ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  }
  return static_cast<std::int64_t>(seed);
}

// Averages go over memory as it lies: the order of dimensions is part of what must agree. Dimensions of one element
// have strides that say nothing.
std::vector<std::int64_t> memoryOrder(const at::Tensor& tensor) {
  std::vector<std::int64_t> strides;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1) {
      strides.push_back(tensor.stride(dim));
    }
  }
  return strides;
}

std::int64_t hashTensors(const std::vector<at::Tensor>& tensors) {
  std::uint64_t value = kFnvBasis;
  for (const at::Tensor& tensor : tensors) {
    value = static_cast<std::uint64_t>(
        hash(value, c10::str(tensor.sizes(), memoryOrder(tensor), c10::toString(tensor.scalar_type()), ";")));
  }
  return static_cast<std::int64_t>(value);
}

std::int64_t numel(const std::vector<at::Tensor>& tensors) {
  std::int64_t total = 0;
  for (const at::Tensor& tensor : tensors) {
    total += tensor.numel();
  }
  return total;
}

}  // namespace

std::int64_t agreementHash(const std::string& text) { return hash(kFnvBasis, text); }

std::vector<int> agreeOnAttach(AttachableBackend& group, const std::vector<at::Tensor>& parameters,
                               const std::vector<at::Tensor>& buffers, const AgreementFields& fields) {
  AgreementFields compared{
      {"number of parameter tensors", static_cast<std::int64_t>(parameters.size())},
      {"number of parameter elements", numel(parameters)},
      {"parameter shapes, strides and dtypes (hash)", hashTensors(parameters)},
      {"number of buffer elements", numel(buffers)},
      {"buffer shapes, strides and dtypes (hash)", hashTensors(buffers)},
  };
  compared.insert(compared.end(), fields.begin(), fields.end());
  const auto width = static_cast<std::int64_t>(compared.size()) + 1;
  at::Tensor own = at::empty({width}, at::kLong);
  for (std::size_t i = 0; i < compared.size(); ++i) {
    own[static_cast<std::int64_t>(i)] = compared[i].second;
  }
  own[width - 1] = agreementHash(core::hostIdentity());
  at::Tensor all = at::empty({group.getSize() * width}, at::kLong);
  group._allgather_base(all, own, c10d::AllgatherOptions())->wait();
  const auto rows = all.view({group.getSize(), width});
  for (std::int64_t rank = 1; rank < group.getSize(); ++rank) {
    for (std::size_t i = 0; i < compared.size(); ++i) {
      const auto field = static_cast<std::int64_t>(i);
      const auto expected = rows[0][field].item<std::int64_t>();
      const auto got = rows[rank][field].item<std::int64_t>();
      if (expected != got) {
        C10_THROW_ERROR(DistBackendError,
                        c10::str("torchext.attach: ", compared[i].first, " is ", expected, " on rank 0 and ", got,
                                 " on rank ", rank, "; all ranks must attach the same model with the same options"));
      }
    }
  }
  std::vector<int> host_of;
  std::vector<std::int64_t> hosts;
  for (std::int64_t rank = 0; rank < group.getSize(); ++rank) {
    const auto host = rows[rank][width - 1].item<std::int64_t>();
    const auto known = std::find(hosts.begin(), hosts.end(), host);
    host_of.push_back(static_cast<int>(known - hosts.begin()));
    if (known == hosts.end()) {
      hosts.push_back(host);
    }
  }
  return host_of;
}

}  // namespace torchext
