// The address manager of a pool of chunk slots: which are free, as runs of neighbours (FIITED, section 3.3).
//
// Freed slots merge with free neighbours. allocate(n) prefers one run: the chunks of a row that lie side by side cost
// one walk through memory instead of n. Among runs that are long enough the shortest is taken, then the first: long
// runs last longer so, and the answer depends on the calls alone, which makes it the same on all ranks.
//
// Not thread-safe. Memory in proportion to the number of runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

namespace torchext::core {

class ChunkSlots {
 public:
  // Slots 0..count-1, of which `taken` are in use. std::invalid_argument unless count >= 0, std::out_of_range for a
  // taken slot outside, std::logic_error for one that is named twice.
  ChunkSlots(std::int32_t count, std::span<const std::int32_t> taken);

  std::int32_t count() const { return count_; }
  std::int32_t free() const { return free_; }
  std::size_t runs() const { return by_start_.size(); }
  // Whether a free run of n neighbours exists.
  bool hasRun(std::int32_t n) const { return by_length_.lower_bound({n, 0}) != by_length_.end(); }

  // n slots: neighbours in rising order if there is such a run, else the longest runs first. std::logic_error, with
  // nothing taken, when fewer than n are free.
  std::vector<std::int32_t> allocate(std::int32_t n);
  // Takes this slot. std::logic_error unless it is free.
  void take(std::int32_t slot);
  bool isFree(std::int32_t slot) const;
  // Returns a slot. std::out_of_range outside the pool, std::logic_error when it is free already.
  void release(std::int32_t slot);

 private:
  void addRun(std::int32_t start, std::int32_t length);
  void removeRun(std::map<std::int32_t, std::int32_t>::iterator run);
  std::map<std::int32_t, std::int32_t>::const_iterator runOf(std::int32_t slot) const;

  std::int32_t count_;
  std::int32_t free_ = 0;
  std::map<std::int32_t, std::int32_t> by_start_;              // start -> length
  std::set<std::pair<std::int32_t, std::int32_t>> by_length_;  // (length, start)
};

}  // namespace torchext::core
