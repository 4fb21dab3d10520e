// bag_dispatch holds what the translation units of the embedding bag's CPU kernels share: a pool's types, and the size
// of a thread's part.
#pragma once

#include <cstdint>

#include <ATen/Dispatch.h>

#define TORCHEXT_DISPATCH_POOL(type, ...) \
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, "adaptive_bag", __VA_ARGS__)

namespace torchext::kernels {

// Bags and rows below which another thread costs more than it saves.
inline constexpr std::int64_t kGrain = 256;

}  // namespace torchext::kernels
