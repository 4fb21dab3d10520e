// BagBatch is one batch of an embedding bag, as the loops read it: ids that were checked, bags as ranges.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/buffer.h"

namespace torchext::cpu {

enum class BagMode { kSum = 0, kMean = 1, kMax = 2 };

struct BagBatch {
  Buffer<std::uint32_t> ids;          // of each position; less than the table's rows
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

  // The bag of each position; of positions behind the last bag nothing is said.
  Buffer<std::uint32_t> bagOf() const {
    Buffer<std::uint32_t> bag_of(ids.size());
    for (std::int64_t bag = 0; bag < bags(); ++bag) {
      const auto b = static_cast<std::size_t>(bag);
      std::fill(bag_of.data() + offsets[b], bag_of.data() + offsets[b + 1], static_cast<std::uint32_t>(b));
    }
    return bag_of;
  }
};

}  // namespace torchext::cpu
