#include "chunk_slots.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "check.h"

namespace torchext::core {

ChunkSlots::ChunkSlots(std::int32_t count, std::span<const std::int32_t> taken) : count_(count) {
  if (count < 0) {
    throwInvalid("slots of the pool", count, "0 or more");
  }
  std::vector<bool> used(static_cast<std::size_t>(count));
  for (const std::int32_t slot : taken) {
    checkIndex("slot", slot, count);
    if (used[index(slot)]) {
      throw std::logic_error(concat("chunk slots: slot ", slot, " is taken twice"));
    }
    used[index(slot)] = true;
  }
  for (std::int32_t slot = 0; slot < count;) {
    std::int32_t end = slot;
    while (end < count && !used[index(end)]) {
      ++end;
    }
    if (end > slot) {
      addRun(slot, end - slot);
    }
    slot = std::max(end, slot + 1);
  }
}

void ChunkSlots::addRun(std::int32_t start, std::int32_t length) {
  by_start_.emplace(start, length);
  by_length_.emplace(length, start);
  free_ += length;
}

void ChunkSlots::removeRun(std::map<std::int32_t, std::int32_t>::iterator run) {
  by_length_.erase({run->second, run->first});
  free_ -= run->second;
  by_start_.erase(run);
}

std::vector<std::int32_t> ChunkSlots::allocate(std::int32_t n) {
  if (n < 0 || n > free_) {
    throw std::logic_error(concat("chunk slots: ", n, " asked for, ", free_, " of ", count_, " are free"));
  }
  std::vector<std::int32_t> slots;
  slots.reserve(index(n));
  while (n > 0) {
    auto found = by_length_.lower_bound({n, 0});
    if (found == by_length_.end()) {
      // No run is long enough: the first of the longest.
      found = by_length_.lower_bound({std::prev(found)->first, 0});
    }
    const auto [length, start] = *found;
    const std::int32_t used = std::min(n, length);
    removeRun(by_start_.find(start));
    if (used < length) {
      addRun(start + used, length - used);
    }
    for (std::int32_t i = 0; i < used; ++i) {
      slots.push_back(start + i);
    }
    n -= used;
  }
  return slots;
}

std::map<std::int32_t, std::int32_t>::const_iterator ChunkSlots::runOf(std::int32_t slot) const {
  auto after = by_start_.upper_bound(slot);
  if (after == by_start_.begin()) {
    return by_start_.end();
  }
  const auto run = std::prev(after);
  return slot < run->first + run->second ? run : by_start_.end();
}

bool ChunkSlots::isFree(std::int32_t slot) const { return runOf(slot) != by_start_.end(); }

void ChunkSlots::take(std::int32_t slot) {
  const auto found = runOf(slot);
  if (found == by_start_.end()) {
    throw std::logic_error(concat("chunk slots: slot ", slot, " is not free"));
  }
  const auto [start, length] = *found;
  removeRun(by_start_.find(start));
  if (slot > start) {
    addRun(start, slot - start);
  }
  if (slot + 1 < start + length) {
    addRun(slot + 1, start + length - slot - 1);
  }
}

void ChunkSlots::release(std::int32_t slot) {
  checkIndex("slot", slot, count_);
  if (isFree(slot)) {
    throw std::logic_error(concat("chunk slots: slot ", slot, " is released, but was free"));
  }
  std::int32_t start = slot;
  std::int32_t length = 1;
  const auto next = by_start_.find(slot + 1);
  if (next != by_start_.end()) {
    length += next->second;
    removeRun(next);
  }
  if (slot > 0) {
    const auto before = runOf(slot - 1);
    if (before != by_start_.end()) {
      start = before->first;
      length += before->second;
      removeRun(by_start_.find(start));
    }
  }
  addRun(start, length);
}

}  // namespace torchext::core
