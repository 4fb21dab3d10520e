// One batch of an embedding bag, in the form that the loops read: ids that were checked, bags as ranges, and, for the
// backward pass, the positions of equal ids side by side.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace torchext::cpu {

enum class BagMode { kSum = 0, kMean = 1, kMax = 2 };

struct BagBatch {
  std::vector<std::uint32_t> ids;     // of each position; less than the table's rows
  std::vector<std::int64_t> offsets;  // bag b is positions offsets[b] .. offsets[b + 1] - 1
  std::int64_t padding = -1;          // the id that counts as not there; -1: none
  BagMode mode = BagMode::kSum;

  std::int64_t bags() const { return static_cast<std::int64_t>(offsets.size()) - 1; }

  // 1 / entries of each bag without padding, 0 for empty ones.
  std::vector<double> inverseCounts() const {
    std::vector<double> inverse(static_cast<std::size_t>(bags()));
    for (std::size_t b = 0; b < inverse.size(); ++b) {
      std::int64_t count = 0;
      for (std::int64_t p = offsets[b]; p < offsets[b + 1]; ++p) {
        count += static_cast<std::int64_t>(ids[static_cast<std::size_t>(p)]) != padding ? 1 : 0;
      }
      inverse[b] = count > 0 ? 1.0 / static_cast<double>(count) : 0.0;
    }
    return inverse;
  }
};

// Positions grouped by id, ids rising, positions rising within an id: a stable order, and so one order of summation
// whatever the number of threads. Padding is left out.
struct GroupedIds {
  std::vector<std::uint64_t> entries;  // id << 32 | position
  std::vector<std::uint32_t> starts;   // of each distinct id's group in entries, and the end
  std::size_t groups() const { return starts.empty() ? 0 : starts.size() - 1; }
  std::uint32_t idOf(std::size_t group) const { return static_cast<std::uint32_t>(entries[starts[group]] >> 32U); }
};

// Radix sort by the id's low `bits` bits, 11 at a time: for the tens of thousands of ids of a batch two or three passes
// through the cache.
inline void radixSort(std::vector<std::uint64_t>& entries, unsigned bits) {
  constexpr unsigned kDigit = 11;
  std::vector<std::uint64_t> other(entries.size());
  const unsigned passes = (bits + kDigit - 1) / kDigit;
  const unsigned width = passes == 0 ? 0 : (bits + passes - 1) / passes;
  for (unsigned pass = 0; pass < passes; ++pass) {
    const unsigned shift = 32 + pass * width;
    const std::uint64_t mask = (std::uint64_t{1} << width) - 1;
    std::array<std::uint32_t, (1U << kDigit) + 1> place{};
    for (const std::uint64_t entry : entries) {
      ++place[((entry >> shift) & mask) + 1];
    }
    for (std::size_t digit = 0; digit < mask; ++digit) {
      place[digit + 1] += place[digit];
    }
    for (const std::uint64_t entry : entries) {
      other[place[(entry >> shift) & mask]++] = entry;
    }
    entries.swap(other);
  }
}

inline GroupedIds groupIds(const BagBatch& batch, std::int64_t rows) {
  GroupedIds grouped;
  const auto first = static_cast<std::size_t>(batch.offsets.front());
  const auto last = static_cast<std::size_t>(batch.offsets.back());
  grouped.entries.reserve(last - first);
  for (std::size_t p = first; p < last; ++p) {
    if (static_cast<std::int64_t>(batch.ids[p]) != batch.padding) {
      grouped.entries.push_back(static_cast<std::uint64_t>(batch.ids[p]) << 32U | p);
    }
  }
  unsigned bits = 0;
  while (bits < 32 && (rows - 1) >> bits > 0) {
    ++bits;
  }
  radixSort(grouped.entries, bits);
  grouped.starts.reserve(grouped.entries.size() + 1);
  for (std::size_t i = 0; i < grouped.entries.size(); ++i) {
    if (i == 0 || grouped.entries[i] >> 32U != grouped.entries[i - 1] >> 32U) {
      grouped.starts.push_back(static_cast<std::uint32_t>(i));
    }
  }
  grouped.starts.push_back(static_cast<std::uint32_t>(grouped.entries.size()));
  return grouped;
}

}  // namespace torchext::cpu
