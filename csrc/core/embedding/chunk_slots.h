// ChunkSlots manages the slots of a pool: which are free, as runs of neighbours (FIITED, section 3.3).
//
// Freed slots merge with free neighbours. allocate(n) prefers one run: the chunks of a row that lie side by side cost
// one walk through memory instead of n. Among runs that are long enough the shortest is taken, then the first: long
// runs last longer so, and the answer depends on the calls alone, which makes it the same on all ranks. Runs of kLong
// slots and more count as equally long: no row asks for more.
//
// Each free run has its length written at both ends, in 4 bytes a slot, so that neighbours are found without a search;
// the starts of runs of one length stand in a queue, from which entries of runs that are gone are taken when they come
// up.
//
// Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <span>
#include <vector>

#include "core/embedding/chunk_index.h"

namespace torchext::core {

class ChunkSlots {
 public:
  static constexpr std::int32_t kLong = ChunkIndex::kMaxChunks;

  // Slots 0..count-1, of which `taken` are in use. std::invalid_argument unless count >= 0, std::out_of_range for a
  // taken slot outside, std::logic_error for one that is named twice.
  ChunkSlots(std::int32_t count, std::span<const std::int32_t> taken);
  // used[slot] is 0 where the slot is free.
  explicit ChunkSlots(std::span<const std::uint8_t> used);

  std::int32_t count() const { return static_cast<std::int32_t>(ends_.size()); }
  std::int32_t free() const { return free_; }
  std::size_t runs() const { return runs_; }
  // Whether a free run of n neighbours exists, 1 <= n <= kLong.
  bool hasRun(std::int32_t n) { return shortest(n) <= kLong; }

  // n slots, n <= kLong: neighbours in rising order if there is such a run, else the longest runs first.
  // std::logic_error, with nothing taken, for more than kLong or more than are free.
  std::vector<std::int32_t> allocate(std::int32_t n);
  bool isFree(std::int32_t slot) const { return free_slots_[static_cast<std::size_t>(slot)]; }
  // Returns a slot. std::out_of_range outside the pool, std::logic_error when it is free already.
  void release(std::int32_t slot);

 private:
  // Starts of runs, the first on top. Those that come in rising order, as all do in the beginning, stand in a list that
  // is read from its front; only others cost a heap's comparisons.
  class Starts {
   public:
    bool empty() const { return next_ == rising_.size() && others_.empty(); }
    std::int32_t top() const { return listIsFirst() ? rising_[next_] : others_.top(); }
    void push(std::int32_t start);
    void pop();

   private:
    bool listIsFirst() const { return next_ < rising_.size() && (others_.empty() || rising_[next_] <= others_.top()); }

    std::vector<std::int32_t> rising_;
    std::size_t next_ = 0;  // of rising_: those before it are gone
    std::priority_queue<std::int32_t, std::vector<std::int32_t>, std::greater<>> others_;
  };

  void addRuns(std::span<const std::uint8_t> used);
  void addRun(std::int32_t start, std::int32_t length);
  void forgetRun(std::int32_t start, std::int32_t length);
  bool isRun(std::int32_t start, std::int32_t length) const;
  // The least of the lengths n, n + 1, ... kLong that has a run, its first run on top; above kLong: none has.
  std::int32_t shortest(std::int32_t n);

  std::int32_t free_ = 0;
  std::size_t runs_ = 0;
  std::vector<std::int32_t> ends_;  // a run's length at its first slot, minus its length at its last one
  std::vector<bool> free_slots_;
  std::array<Starts, kLong + 1> starts_;  // by length, kLong for that and more; some of runs that are gone
  std::array<std::uint64_t, kLong / 64 + 1> lengths_{};  // a bit for each element of starts_ that is not empty
};

}  // namespace torchext::core
