#include "ddp/common/frozen_parameters.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "c10d/transport/agreement.h"
#include "ddp/common/side_stream.h"

namespace torchext {
namespace {

// Four sums side by side, so that it keeps pace with memory.
std::int64_t contentHash(const at::Tensor& tensor) {
  constexpr std::uint64_t kPrime = 0x9e3779b97f4a7c15ULL;
  const at::Tensor values = tensor.detach().cpu().contiguous();
  const auto* bytes = static_cast<const std::byte*>(values.const_data_ptr());
  std::size_t left = values.nbytes();
  std::array<std::uint64_t, 4> sums{1, 2, 3, 4};
  std::array<std::uint64_t, 4> words{};
  while (left > 0) {
    const std::size_t step = std::min(left, sizeof words);
    words = {};
    std::memcpy(words.data(), bytes, step);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      sums[i] = std::rotl((sums[i] ^ words[i]) * kPrime, 29);
    }
    bytes += step;
    left -= step;
  }
  std::uint64_t hash = 0;
  for (const std::uint64_t sum : sums) {
    hash = std::rotl((hash ^ sum) * kPrime, 29);
  }
  return static_cast<std::int64_t>(hash);
}

bool hasAverage(const at::Tensor& tensor) {
  const c10::ScalarType dtype = tensor.scalar_type();
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
}

}  // namespace

FrozenParameters::FrozenParameters(const std::vector<at::Tensor>& tensors) {
  std::copy_if(tensors.begin(), tensors.end(), std::back_inserter(tensors_), hasAverage);
}

std::vector<at::Tensor> FrozenParameters::differing(AttachableBackend& group) const {
  std::vector<at::Tensor> result;
  const auto count = static_cast<std::int64_t>(tensors_.size());
  if (count == 0) {
    return result;
  }
  for (const at::Tensor& tensor : tensors_) {
    synchronizeDevice(tensor.device());  // who trains may do so on another stream
  }
  const at::Tensor own = at::empty({count}, at::kLong);
  std::transform(tensors_.begin(), tensors_.end(), own.mutable_data_ptr<std::int64_t>(), contentHash);
  const at::Tensor all = at::empty({group.getSize(), count}, at::kLong);
  agreementGroup(group).gather(own, all);
  const at::Tensor same = all.eq(all[0]).all(0);
  for (std::int64_t i = 0; i < count; ++i) {
    if (!same[i].item<bool>()) {
      result.push_back(tensors_[static_cast<std::size_t>(i)]);
    }
  }
  return result;
}

}  // namespace torchext
