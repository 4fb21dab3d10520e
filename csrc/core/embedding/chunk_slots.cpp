#include "core/embedding/chunk_slots.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <stdexcept>

#include "core/base/check.h"

namespace torchext::core {

void ChunkSlots::Starts::push(std::int32_t start) {
  if (next_ == rising_.size()) {
    rising_.clear();
    next_ = 0;
  }
  if (rising_.empty() || start >= rising_.back()) {
    rising_.push_back(start);
  } else {
    others_.push(start);
  }
}

void ChunkSlots::Starts::pop() {
  if (listIsFirst()) {
    ++next_;
  } else {
    others_.pop();
  }
}

ChunkSlots::ChunkSlots(std::int32_t count, std::span<const std::int32_t> taken) {
  if (count < 0) {
    throwInvalid("slots of the pool", count, "0 or more");
  }
  std::vector<std::uint8_t> used(static_cast<std::size_t>(count));
  for (const std::int32_t slot : taken) {
    checkIndex("slot", slot, count);
    if (used[index(slot)] != 0) {
      throw std::logic_error(concat("chunk slots: slot ", slot, " is taken twice"));
    }
    used[index(slot)] = 1;
  }
  addRuns(used);
}

ChunkSlots::ChunkSlots(std::span<const std::uint8_t> used) { addRuns(used); }

void ChunkSlots::addRuns(std::span<const std::uint8_t> used) {
  ends_.resize(used.size());
  free_slots_.resize(used.size());
  for (auto at = used.begin(); at != used.end();) {
    const auto start = std::find(at, used.end(), 0);
    at = std::find_if(start, used.end(), [](std::uint8_t mark) { return mark != 0; });
    if (at != start) {
      addRun(static_cast<std::int32_t>(start - used.begin()), static_cast<std::int32_t>(at - start));
      std::fill_n(free_slots_.begin() + (start - used.begin()), at - start, true);
    }
  }
}

void ChunkSlots::addRun(std::int32_t start, std::int32_t length) {
  ends_[index(start + length - 1)] = -length;
  ends_[index(start)] = length;  // in this order: of a run of one slot the start stays
  const auto bucket = index(std::min(length, kLong));
  starts_[bucket].push(start);
  lengths_[bucket / 64] |= std::uint64_t{1} << (bucket % 64);
  free_ += length;
  ++runs_;
}

void ChunkSlots::forgetRun(std::int32_t start, std::int32_t length) {
  ends_[index(start)] = ends_[index(start + length - 1)] = 0;
  free_ -= length;
  --runs_;
}

bool ChunkSlots::isRun(std::int32_t start, std::int32_t length) const {
  return isFree(start) && std::min(ends_[index(start)], kLong) == length;
}

std::int32_t ChunkSlots::shortest(std::int32_t n) {
  for (std::size_t word = index(n) / 64; word < lengths_.size(); ++word) {
    while (true) {
      const std::uint64_t wanted = word == index(n) / 64 ? ~std::uint64_t{0} << (index(n) % 64) : ~std::uint64_t{0};
      if ((lengths_[word] & wanted) == 0) {
        break;
      }
      const int bit = std::countr_zero(lengths_[word] & wanted);
      const auto length = static_cast<std::int32_t>(word * 64) + bit;
      Starts& starts = starts_[index(length)];
      while (!starts.empty() && !isRun(starts.top(), length)) {
        starts.pop();
      }
      if (!starts.empty()) {
        return length;
      }
      lengths_[word] &= ~(std::uint64_t{1} << static_cast<unsigned>(bit));
    }
  }
  return kLong + 1;
}

std::vector<std::int32_t> ChunkSlots::allocate(std::int32_t n) {
  if (n < 0 || n > std::min(free_, kLong)) {
    throw std::logic_error(concat("chunk slots: ", n, " asked for, ", free_, " of ", count(), " are free, and at most ",
                                  kLong, " given at once"));
  }
  std::vector<std::int32_t> slots;
  slots.reserve(index(n));
  std::int32_t left = n;
  while (left > 0) {
    std::int32_t bucket = shortest(left);
    if (bucket > kLong) {  // no run is long enough: the first of the longest, and all of it
      for (std::int32_t next = shortest(1); next <= kLong; next = shortest(next + 1)) {
        bucket = next;
      }
    }
    const std::int32_t start = starts_[index(bucket)].top();
    const std::int32_t length = ends_[index(start)];
    const std::int32_t used = std::min(left, length);
    starts_[index(bucket)].pop();
    forgetRun(start, length);
    std::fill_n(free_slots_.begin() + start, used, false);
    if (used < length) {
      addRun(start + used, length - used);
    }
    for (std::int32_t i = 0; i < used; ++i) {
      slots.push_back(start + i);
    }
    left -= used;
  }
  return slots;
}

void ChunkSlots::release(std::int32_t slot) {
  checkIndex("slot", slot, count());
  if (isFree(slot)) {
    throw std::logic_error(concat("chunk slots: slot ", slot, " is released, but was free"));
  }
  std::int32_t start = slot;
  std::int32_t length = 1;
  if (slot + 1 < count() && isFree(slot + 1)) {
    const std::int32_t after = ends_[index(slot + 1)];
    forgetRun(slot + 1, after);
    length += after;
  }
  if (slot > 0 && isFree(slot - 1)) {
    const std::int32_t before = std::abs(ends_[index(slot - 1)]);
    start -= before;
    forgetRun(start, before);
    length += before;
  }
  free_slots_[index(slot)] = true;
  addRun(start, length);
}

}  // namespace torchext::core
