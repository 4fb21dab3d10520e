#include "core/embedding/chunk_index.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "core/base/check.h"

namespace torchext::core {

ChunkIndex::ChunkIndex(Layout layout, std::int64_t rows, int chunks) : layout_(layout), rows_(rows), chunks_(chunks) {
  if (chunks < 1 || chunks > kMaxChunks) {
    throwInvalid("chunks of a row", chunks, concat("1..", kMaxChunks, "; take a larger chunk_dim"));
  }
  if (rows < 0 || rows > kMaxKeys / chunks) {
    throwInvalid("rows", rows,
                 concat("0..", kMaxKeys / chunks, " with ", chunks,
                        " chunks a row; take a larger chunk_dim, or share the rows out over several tables"));
  }
}

ChunkIndex ChunkIndex::identity(std::int64_t rows, int chunks) { return {Layout::kIdentity, rows, chunks}; }

ChunkIndex ChunkIndex::direct(std::span<std::int32_t> cells, std::int64_t rows, int chunks) {
  ChunkIndex index(Layout::kDirect, rows, chunks);
  if (static_cast<std::int64_t>(cells.size()) != index.keys()) {
    throwInvalid("cells of the direct index", cells.size(), concat(index.keys(), ": rows times chunks"));
  }
  index.direct_ = cells.data();
  index.cells_ = cells.size();
  return index;
}

ChunkIndex ChunkIndex::hashed(std::span<std::int64_t> cells, std::int64_t rows, int chunks) {
  ChunkIndex index(Layout::kHashed, rows, chunks);
  if (cells.empty() || cells.size() >> 32U != 0) {
    throwInvalid("cells of the hashed index", cells.size(), "1..2^32-1");
  }
  index.hashed_ = cells.data();
  index.cells_ = cells.size();
  return index;
}

void ChunkIndex::insert(std::int64_t key, std::int32_t slot) {
  if (layout_ == Layout::kIdentity) {
    throw std::logic_error("chunk index: the identity layout holds every chunk; nothing can be inserted");
  }
  if (layout_ == Layout::kDirect) {
    if (direct_[key] != kAbsent) {
      throw std::logic_error(concat("chunk index: key ", key, " is resident already, in slot ", direct_[key]));
    }
    direct_[key] = slot;
    return;
  }
  std::size_t at = home(key / chunks_);
  for (std::size_t seen = 0; hashed_[at] != kEmpty; at = after(at), ++seen) {
    if (keyOf(hashed_[at]) == key) {
      throw std::logic_error(concat("chunk index: key ", key, " is resident already, in slot ", slotOf(hashed_[at])));
    }
    if (seen + 2 >= cells_) {  // a walk needs one empty cell to end at
      throw std::logic_error(concat("chunk index: the hash of ", cells_, " cells is full"));
    }
  }
  hashed_[at] = key << 32 | slot;
}

std::int32_t ChunkIndex::erase(std::int64_t key) {
  std::int32_t slot = kAbsent;
  if (layout_ == Layout::kDirect) {
    slot = direct_[key];
    direct_[key] = kAbsent;
  } else if (layout_ == Layout::kHashed) {
    std::size_t hole = home(key / chunks_);
    while (hashed_[hole] != kEmpty && keyOf(hashed_[hole]) != key) {
      hole = after(hole);
    }
    if (hashed_[hole] != kEmpty) {
      slot = slotOf(hashed_[hole]);
      // Cells behind the hole move into it unless that would put them before their home.
      for (std::size_t at = after(hole); hashed_[at] != kEmpty; at = after(at)) {
        const std::size_t from = home(keyOf(hashed_[at]) / chunks_);
        const bool stays = hole < at ? (from > hole && from <= at) : (from > hole || from <= at);
        if (!stays) {
          hashed_[hole] = hashed_[at];
          hole = at;
        }
      }
      hashed_[hole] = kEmpty;
    }
  }
  if (slot == kAbsent || layout_ == Layout::kIdentity) {
    throw std::logic_error(concat("chunk index: key ", key, " is not resident, or may not leave"));
  }
  return slot;
}

ChunkIndex::Residents ChunkIndex::markSlots(std::span<std::uint8_t> used) const {
  const std::size_t count = used.size();
  const auto for_each_cell = [&](auto&& see) {
    if (layout_ == Layout::kHashed) {
      for (const std::int64_t cell : std::span(hashed_, cells_)) {
        see(cell == kEmpty ? kAbsent : slotOf(cell));
      }
    } else if (layout_ == Layout::kDirect) {
      for (const std::int32_t slot : directCells()) {
        see(slot);
      }
    } else {
      for (std::int64_t key = 0; key < keys(); ++key) {
        see(static_cast<std::int32_t>(key));
      }
    }
  };
  const auto end = static_cast<std::int32_t>(std::min<std::size_t>(count, kMaxKeys));
  std::int32_t all = 0;
  std::int32_t beyond = 0;
  for_each_cell([&](std::int32_t slot) {
    all += slot >= 0 ? 1 : 0;
    beyond += slot >= end ? 1 : 0;
  });
  if (static_cast<std::size_t>(all - beyond) == count) {  // as mostly: a full pool
    std::fill(used.begin(), used.end(), std::uint8_t{1});
  } else if (all > beyond) {
    // An absent chunk marks a byte that nobody reads: which are resident is not to be predicted.
    std::vector<std::uint8_t> marks(count + 1);
    std::uint8_t* const mark_of = marks.data();
    for_each_cell([&](std::int32_t slot) {
      mark_of[std::min(static_cast<std::size_t>(static_cast<std::uint32_t>(slot)), count)] = 1;
    });
    std::copy_n(marks.begin(), count, used.begin());
  }  // else nothing is resident, as before the first pruning
  return {all, beyond};
}

}  // namespace torchext::core
