// bag_elements maps torch's element types to those of the embedding bag's CUDA kernels.
#pragma once

#include <type_traits>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "kernels/cuda/float4.h"

namespace torchext::cuda {

// The launchers' type of the same bits.
template <class T>
using ElementOf = std::conditional_t<std::is_same_v<T, c10::Half>, Float16,
                                     std::conditional_t<std::is_same_v<T, c10::BFloat16>, BFloat16, T>>;

static_assert(sizeof(Float16) == sizeof(c10::Half) && sizeof(BFloat16) == sizeof(c10::BFloat16));

}  // namespace torchext::cuda
