// Cuts a range of the flat buffer at the borders of the tensors that lie in it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace torchext::cpu {

// One stretch inside a single tensor.
struct Piece {
  std::size_t tensor;         // index of the tensor
  std::int64_t tensor_begin;  // first element, counted from the tensor's start
  std::int64_t flat_begin;    // the same element, counted from the buffer's start
  std::int64_t count;         // elements, 1 or more
};

// Calls visit(Piece) for every piece of [begin, end), in order. offsets[i] is where tensor i starts in the buffer;
// offsets.back() is the buffer's size. Empty tensors yield no piece.
template <class Visit>
void forEachPiece(std::span<const std::int64_t> offsets, std::int64_t begin, std::int64_t end, Visit&& visit) {
  if (begin >= end) {
    return;
  }
  // The last tensor that starts at or before begin: with empty tensors in between, the one that holds the element.
  const auto after = std::upper_bound(offsets.begin(), offsets.end(), begin);
  auto tensor = static_cast<std::size_t>(after - offsets.begin()) - 1;
  while (begin < end) {
    const std::int64_t stop = std::min(end, offsets[tensor + 1]);
    if (stop > begin) {
      visit(Piece{tensor, begin - offsets[tensor], begin, stop - begin});
      begin = stop;
    }
    ++tensor;
  }
}

}  // namespace torchext::cpu
