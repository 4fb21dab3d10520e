// float16 and bfloat16 as bits: conversions that are exact on the way to float and round to nearest even on the way
// back. Branch-free where it matters, so that loops over them vectorise without F16C.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/cpu/isa.h"

namespace torchext::cpu {

TORCHEXT_ALWAYS_INLINE float halfToFloat(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000U) << 16U;
  const std::uint32_t magnitude = half & 0x7FFFU;
  const bool special = magnitude >= 0x7C00U;  // infinity and NaN keep an exponent of all ones
  const std::uint32_t normal = (magnitude << 13U) + (special ? 0x70000000U : 0x38000000U);
  // Subnormal halves count units of 2^-24, which is the last bit of 0.5: no subnormal float appears on the way, so the
  // result is the same when the processor flushes those to zero.
  const float subnormal = std::bit_cast<float>(magnitude | 0x3F000000U) - 0.5F;
  const std::uint32_t bits = magnitude < 0x0400U ? std::bit_cast<std::uint32_t>(subnormal) : normal;
  return std::bit_cast<float>(bits | sign);
}

TORCHEXT_ALWAYS_INLINE std::uint16_t floatToHalf(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16U) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  // Normal halves: rebase the exponent, add half a unit (rounding to even by the last kept bit), drop 13 bits.
  const std::uint32_t normal = (magnitude - 0x38000000U + 0xFFFU + ((magnitude >> 13U) & 1U)) >> 13U;
  // Subnormal halves: adding 0.5 lets the float adder align and round; the low bits of the sum are the result.
  const float aligned = std::bit_cast<float>(magnitude) + 0.5F;
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(aligned) - 0x3F000000U;
  const std::uint32_t finite = magnitude < 0x38800000U ? subnormal : normal;
  const std::uint32_t infinite = magnitude > 0x7F800000U ? 0x7E00U : 0x7C00U;
  return static_cast<std::uint16_t>(sign | (magnitude >= 0x477FF000U ? infinite : finite));
}

TORCHEXT_ALWAYS_INLINE float bfloatToFloat(std::uint16_t bfloat) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bfloat) << 16U);
}

TORCHEXT_ALWAYS_INLINE std::uint16_t floatToBfloat(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16U) & 1U)) >> 16U;
  return static_cast<std::uint16_t>((bits & 0x7FFFFFFFU) > 0x7F800000U ? 0x7FC0U : rounded);
}

}  // namespace torchext::cpu
