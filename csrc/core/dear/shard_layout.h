// ShardLayout cuts the tensors of one bucket over the ranks, and says where the pieces lie in the bucket's buffer.
//
// Every tensor is cut by torch.chunk's rule: of N elements rank r of n owns [r c, (r + 1) c) with c = ceil(N / n), the
// last ranks fewer or none. So what a rank owns of a tensor does not depend on the bucket it travels in: buckets may be
// planned anew while an optimizer keeps the state of its slices, and a slice is what DTensor calls Shard(0).
//
// The buffer holds n equal chunks, one a rank: the slices that this rank owns, in the order of the tensors, then one
// mark a tensor (how many ranks have a gradient for it travels with the gradients), then padding to a cache line.
// Elements of one type; a pure value, computed alike by every rank.
#pragma once

#include <cstddef>
#include <vector>

#include "core/transport/ring_plan.h"

namespace torchext::core {

// The elements of a tensor of `elements` that `rank` of `world_size` owns.
Span sliceOf(std::size_t elements, int world_size, int rank);

class ShardLayout {
 public:
  // elements[tensor]: 0 or more. element_size in bytes, world_size: 1 or more (std::invalid_argument otherwise).
  ShardLayout(std::vector<std::size_t> elements, std::size_t element_size, int world_size);

  int tensorCount() const { return static_cast<int>(elements_.size()); }
  int worldSize() const { return world_size_; }
  std::size_t chunkElements() const { return chunk_; }
  std::size_t bufferElements() const { return chunk_ * static_cast<std::size_t>(world_size_); }
  // In elements of the tensor.
  Span slice(int tensor, int rank) const;
  // Where that slice lies in the buffer, and the tensor's mark in that rank's chunk. std::out_of_range on a bad index.
  std::size_t position(int tensor, int rank) const;
  std::size_t markPosition(int tensor, int rank) const;

 private:
  std::vector<std::size_t> elements_;
  std::vector<std::size_t> offset_;  // [tensor] of its slice in a chunk; one more: where the marks begin
  std::size_t chunk_ = 0;
  int world_size_;
};

}  // namespace torchext::core
