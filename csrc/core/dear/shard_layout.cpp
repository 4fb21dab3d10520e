#include "core/dear/shard_layout.h"

#include <algorithm>
#include <utility>

#include "core/base/check.h"
#include "core/transport/cache_line.h"

namespace torchext::core {
namespace {

std::size_t perRank(std::size_t elements, int world_size) {
  return (elements + index(world_size) - 1) / index(world_size);
}

}  // namespace

Span sliceOf(std::size_t elements, int world_size, int rank) {
  checkIndex("rank", rank, world_size);
  const std::size_t each = perRank(elements, world_size);
  const std::size_t begin = std::min(elements, each * index(rank));
  return {begin, std::min(each, elements - begin)};
}

ShardLayout::ShardLayout(std::vector<std::size_t> elements, std::size_t element_size, int world_size)
    : elements_(std::move(elements)), world_size_(world_size) {
  if (element_size == 0) {
    throwInvalid("element_size", element_size, "1 or more bytes");
  }
  if (world_size < 1) {
    throwInvalid("world_size", world_size, "1 or more");
  }
  std::size_t end = 0;
  for (const std::size_t count : elements_) {
    offset_.push_back(end);
    end += perRank(count, world_size);
  }
  offset_.push_back(end);
  end += elements_.size();
  const std::size_t line = elementsPerLine(element_size);
  chunk_ = (end + line - 1) / line * line;
}

Span ShardLayout::slice(int tensor, int rank) const {
  checkIndex("tensor", tensor, tensorCount());
  return sliceOf(elements_[index(tensor)], world_size_, rank);
}

std::size_t ShardLayout::position(int tensor, int rank) const {
  checkIndex("tensor", tensor, tensorCount());
  checkIndex("rank", rank, world_size_);
  return chunk_ * index(rank) + offset_[index(tensor)];
}

std::size_t ShardLayout::markPosition(int tensor, int rank) const {
  checkIndex("tensor", tensor, tensorCount());
  checkIndex("rank", rank, world_size_);
  return chunk_ * index(rank) + offset_.back() + index(tensor);
}

}  // namespace torchext::core
