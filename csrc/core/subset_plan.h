// How a collective over any subset of ranks proceeds: which algorithm, and who sends what to whom at which step.
//
// Plans only: members are positions 0..group_size-1 in the sorted list of the group, buffers are element counts.
// Whoever moves the bytes walks the plan. Everything here is a pure value, computed alike by every member from (bytes,
// size, tuning), which must therefore be equal on all members.
//
// All three end with bit-equal results on all members, provided the reduction of two values is commutative:
//   direct     every member gets all the others' buffers and must reduce them in the order of positions 0, 1, 2 ...
//   doubling   both partners of a round reduce the same two values; a folded member receives the finished result
//   ring       each chunk is reduced along one path and its result copied around
#pragma once

#include <cstddef>
#include <cstdint>

namespace torchext::core {

enum class SubsetAlgorithm { kNone, kDirect, kRecursiveDoubling, kRing };
const char* toString(SubsetAlgorithm algorithm);

struct SubsetTuning {
  std::size_t small_bytes = std::size_t{64} << 10U;     // up to here latency counts: direct or recursive doubling
  int direct_group = 4;                                 // largest group for the direct exchange, 1 or more
  std::size_t segment_bytes = std::size_t{512} << 10U;  // ring: largest message, 1 or more
};

// kNone: nothing to send (a group of one, or no bytes). kDirect: small and at most direct_group members.
// kRecursiveDoubling: small, more members. kRing: the rest.
// std::invalid_argument when group_size < 1, direct_group < 1 or segment_bytes is 0.
SubsetAlgorithm chooseAlgorithm(std::size_t bytes, int group_size, const SubsetTuning& tuning);

// Part of a buffer, in elements.
struct Span {
  std::size_t begin = 0;
  std::size_t count = 0;
  friend bool operator==(const Span&, const Span&) = default;
};

// Recursive doubling for any size: with p the largest power of two that is not above the size, the members p.. are
// folded.
//   1. member m >= p sends its buffer to m - p, which reduces it into its own;
//   2. members below p: rounds() times, exchange the buffer with partner(member, round) and reduce;
//   3. m - p sends the result to m.
class DoublingPlan {
 public:
  // std::invalid_argument unless group_size is 1 or more.
  explicit DoublingPlan(int group_size);

  int groupSize() const { return group_size_; }
  int rounds() const { return rounds_; }
  // Members below it take part in the rounds.
  int core() const { return 1 << rounds_; }
  bool folded(int member) const;
  // The member that a folded one folds into, or the folded one that this one serves; -1 when there is none.
  int foldPartner(int member) const;
  // std::out_of_range for a folded member or a round outside 0..rounds()-1.
  int partner(int member, int round) const;

 private:
  int group_size_;
  int rounds_;
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

  int groupSize() const { return group_size_; }
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
