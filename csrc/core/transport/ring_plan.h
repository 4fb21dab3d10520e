// RingPlan says who sends what to whom at which step of a ring all-reduce over any subset of ranks.
//
// A plan only: members are positions 0..group_size-1 in the sorted list of the group, buffers are element counts.
// Whoever moves the bytes walks the plan. It is a pure value, computed alike by every member from (elements, element
// size, group size, segment bytes), which must therefore be equal on all members.
//
// It ends with bit-equal results on all members: each chunk is reduced along one path and its result copied around.
#pragma once

#include <cstddef>

namespace torchext::core {

// Part of a buffer, in elements.
struct Span {
  std::size_t begin = 0;
  std::size_t count = 0;
  friend bool operator==(const Span&, const Span&) = default;
};

// Segmented ring all-reduce: the buffer is cut into one chunk a member, a chunk into segments (one message each).
// Member m sends to m + 1 and receives from m - 1 (cyclic) at every step.
//   steps 0 .. size-2            reduce-scatter: reduce the received chunk into the own buffer
//   steps size-1 .. 2*(size-1)-1 all-gather: copy the received chunk into the own buffer
// What member m sends at step s is what m + 1 receives at step s, and what m receives at step s it sends at step s + 1:
// a segment can be forwarded as soon as it has been reduced, before the rest of its chunk is there. After the
// reduce-scatter member m holds the finished chunk ownedChunk(m). Chunks may be empty (fewer elements than members):
// both sides skip them.
class RingPlan {
 public:
  // element_size, segment_bytes: bytes. std::invalid_argument unless group_size, element_size and segment_bytes are 1
  // or more. A segment has at least one element even where an element is larger than segment_bytes.
  RingPlan(std::size_t elements, std::size_t element_size, int group_size, std::size_t segment_bytes);

  int steps() const { return 2 * (group_size_ - 1); }
  // True for the steps that reduce, false for those that copy.
  bool reduces(int step) const;
  int next(int member) const;
  int previous(int member) const;

  // Chunk that member sends or receives at step 0..steps()-1.
  int sendChunk(int member, int step) const;
  int receiveChunk(int member, int step) const;
  int ownedChunk(int member) const { return next(member); }

  // Chunks are in order, disjoint, and cover the buffer. They begin at multiples of 64 bytes (from the start of the
  // buffer) where every member can have at least one such line, and differ by one line at most.
  Span chunk(int chunk) const;
  // Messages that a chunk is sent in: 0 for an empty chunk. Segments keep the 64-byte lines where segment_bytes allows.
  int segments(int chunk) const;
  Span segment(int chunk, int segment) const;
  // Elements of the largest segment: the size of a receive buffer.
  std::size_t largestSegment() const;

 private:
  std::size_t elements_;
  std::size_t line_ = 1;     // elements that a boundary is a multiple of
  std::size_t segment_ = 1;  // elements
  int group_size_;
};

}  // namespace torchext::core
