#include "core/transport/ring_plan.h"

#include <algorithm>

#include "core/base/check.h"
#include "core/transport/cache_line.h"

namespace torchext::core {
namespace {

int checkedGroupSize(int group_size) {
  if (group_size < 1) {
    throwInvalid("group_size", group_size, "1 or more");
  }
  return group_size;
}

}  // namespace

RingPlan::RingPlan(std::size_t elements, std::size_t element_size, int group_size, std::size_t segment_bytes)
    : elements_(elements), group_size_(checkedGroupSize(group_size)) {
  if (element_size == 0) {
    throwInvalid("element_size", element_size, "1 or more bytes");
  }
  if (segment_bytes == 0) {
    throwInvalid("segment_bytes", segment_bytes, "1 or more");
  }
  const std::size_t aligned = elementsPerLine(element_size);
  if (elements / aligned >= index(group_size)) {
    line_ = aligned;
  }
  segment_ = std::max<std::size_t>(1, segment_bytes / element_size);
  if (segment_ >= line_) {
    segment_ -= segment_ % line_;
  }
}

bool RingPlan::reduces(int step) const {
  checkIndex("step", step, steps());
  return step < group_size_ - 1;
}

int RingPlan::next(int member) const {
  checkIndex("member", member, group_size_);
  return (member + 1) % group_size_;
}

int RingPlan::previous(int member) const {
  checkIndex("member", member, group_size_);
  return (member + group_size_ - 1) % group_size_;
}

int RingPlan::sendChunk(int member, int step) const {
  checkIndex("member", member, group_size_);
  checkIndex("step", step, steps());
  // One formula for both halves: at step size-1, member - (size-1) = member + 1, the chunk it has just finished.
  return (member - step + 2 * group_size_) % group_size_;
}

int RingPlan::receiveChunk(int member, int step) const { return sendChunk(previous(member), step); }

Span RingPlan::chunk(int chunk) const {
  checkIndex("chunk", chunk, group_size_);
  // Whole lines are dealt out evenly; the end of the buffer cuts the last one.
  const std::size_t lines = (elements_ + line_ - 1) / line_;
  const std::size_t each = lines / index(group_size_);
  const std::size_t more = lines % index(group_size_);
  const auto boundary = [&](int i) {
    return std::min(elements_, (each * index(i) + std::min(more, index(i))) * line_);
  };
  const std::size_t begin = boundary(chunk);
  return Span{begin, boundary(chunk + 1) - begin};
}

int RingPlan::segments(int chunk) const {
  return static_cast<int>((this->chunk(chunk).count + segment_ - 1) / segment_);
}

Span RingPlan::segment(int chunk, int segment) const {
  checkIndex("segment", segment, segments(chunk));
  const Span whole = this->chunk(chunk);
  const std::size_t offset = index(segment) * segment_;
  return Span{whole.begin + offset, std::min(segment_, whole.count - offset)};
}

std::size_t RingPlan::largestSegment() const { return std::min(segment_, chunk(0).count); }

}  // namespace torchext::core
