// Numbers packed without their zeros: half of what comes from behind a ReLU, forward and backward, is zero.
//
// Packed: a mask of one bit for each number, 1 where it is not zero, in words as wide as a number; then the numbers
// that are not zero, in order. Lossless: zero is what has no bit set, and -0 is not. Plain loops over memory of the
// caller.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

namespace torchext::core {

template <class T>
using ZeroMask = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;

// Packs `count` numbers into at most `room`; returns how many elements that took. None: there was not enough room, and
// what is in `to` is of no use.
template <class T>
std::optional<std::size_t> packZeros(const T* from, std::size_t count, T* to, std::size_t room) {
  using Word = ZeroMask<T>;
  constexpr std::size_t kBits = 8 * sizeof(T);
  const std::size_t words = (count + kBits - 1) / kBits;
  if (words > room) {
    return std::nullopt;
  }
  T* masks = to;
  std::size_t end = words;
  for (std::size_t word = 0; word < words; ++word, from += kBits) {
    const std::size_t here = std::min(kBits, count - word * kBits);
    Word mask = 0;
    for (std::size_t bit = 0; bit < here; ++bit) {
      mask |= static_cast<Word>(std::bit_cast<Word>(from[bit]) != 0) << bit;
    }
    if (end + static_cast<std::size_t>(std::popcount(mask)) > room) {
      return std::nullopt;
    }
    std::memcpy(masks + word, &mask, sizeof(mask));
    for (Word rest = mask; rest != 0; rest &= rest - 1) {
      std::memcpy(to + end++, from + std::countr_zero(rest), sizeof(T));
    }
  }
  return end;
}

// Unpacks `count` numbers from at most `available` elements; returns how many those were. None: they would be more, so
// this is nothing that was packed; what is in `to` is of no use.
template <class T>
std::optional<std::size_t> unpackZeros(const T* from, std::size_t available, std::size_t count, T* to) {
  using Word = ZeroMask<T>;
  constexpr std::size_t kBits = 8 * sizeof(T);
  const std::size_t words = (count + kBits - 1) / kBits;
  if (words > available) {
    return std::nullopt;
  }
  const T* masks = from;
  std::size_t next = words;
  for (std::size_t word = 0; word < words; ++word, to += kBits) {
    const std::size_t here = std::min(kBits, count - word * kBits);
    Word mask = 0;
    std::memcpy(&mask, masks + word, sizeof(mask));
    if (here < kBits) {
      mask &= (Word{1} << here) - 1;
    }
    if (next + static_cast<std::size_t>(std::popcount(mask)) > available) {
      return std::nullopt;
    }
    std::fill_n(to, here, T(0));
    for (Word rest = mask; rest != 0; rest &= rest - 1) {
      std::memcpy(to + std::countr_zero(rest), from + next++, sizeof(T));
    }
  }
  return next;
}

}  // namespace torchext::core
