// The positions of a batch grouped by id, for the backward pass.
//
// Ids rise, positions rise within an id: a stable order, and so one order of summation whatever the number of threads.
// Rising ids also walk through the pool from one end to the other, which spares the processor's table of pages.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/bag_batch.h"
#include "kernels/buffer.h"

namespace torchext::cpu {

struct GroupedIds {
  Buffer<std::uint64_t> entries;  // id << 32 | position; padding is left out
  Buffer<std::uint32_t> starts;   // of each distinct id's group in entries, and the end
  std::size_t groups() const { return starts.empty() ? 0 : starts.size() - 1; }
  std::uint32_t idOf(std::size_t group) const { return static_cast<std::uint32_t>(entries[starts[group]] >> 32U); }
};

// Radix sort of id << 32 | position by the ids, which are below `rows`: stable, and for the tens of thousands of ids of
// a batch two or three passes through the cache, because only the digits that rows - 1 has are sorted.
inline void radixSort(Buffer<std::uint64_t>& entries, std::int64_t rows) {
  constexpr int kMostBits = 11;
  const auto most = static_cast<std::uint64_t>(std::max<std::int64_t>(rows, 1) - 1);
  const auto bits = static_cast<int>(std::bit_width(most));
  const int passes = (bits + kMostBits - 1) / kMostBits;
  const int digit_bits = passes == 0 ? 0 : (bits + passes - 1) / passes;
  const std::uint64_t mask = (std::uint64_t{1} << digit_bits) - 1;
  const auto digit = [=](std::uint64_t entry, int pass) { return (entry >> (32 + pass * digit_bits)) & mask; };
  Buffer<std::uint64_t> other(entries.size());
  for (int pass = 0; pass < passes; ++pass) {
    std::array<std::uint32_t, (1U << kMostBits)> place{};
    for (const std::uint64_t entry : entries) {
      ++place[digit(entry, pass)];
    }
    std::uint32_t before = 0;
    for (std::size_t d = 0; d <= mask; ++d) {
      const std::uint32_t count = place[d];
      place[d] = before;
      before += count;
    }
    for (const std::uint64_t entry : entries) {
      other[place[digit(entry, pass)]++] = entry;
    }
    entries.swap(other);
  }
}

inline GroupedIds groupIds(const BagBatch& batch, std::int64_t rows) {
  GroupedIds grouped;
  const auto first = static_cast<std::size_t>(batch.offsets.front());
  const auto last = static_cast<std::size_t>(batch.offsets.back());
  // Entry and start are written before it is known whether they count: no branch that goes either way by chance.
  grouped.entries.resize(last - first);
  std::size_t count = 0;
  for (std::size_t p = first; p < last; ++p) {
    grouped.entries[count] = static_cast<std::uint64_t>(batch.ids[p]) << 32U | p;
    count += static_cast<std::int64_t>(batch.ids[p]) != batch.padding ? 1 : 0;
  }
  grouped.entries.resize(count);
  radixSort(grouped.entries, rows);
  grouped.starts.resize(count + 1);
  std::size_t groups = 0;
  std::uint64_t before = ~std::uint64_t{0};
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t id = grouped.entries[i] >> 32U;
    grouped.starts[groups] = static_cast<std::uint32_t>(i);
    groups += id != before ? 1 : 0;
    before = id;
  }
  grouped.starts[groups] = static_cast<std::uint32_t>(count);
  grouped.starts.resize(groups + 1);
  return grouped;
}

}  // namespace torchext::cpu
