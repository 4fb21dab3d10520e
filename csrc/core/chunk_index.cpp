#include "chunk_index.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "check.h"

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

std::size_t ChunkIndex::markSlots(std::span<std::uint8_t> used) const {
  // An absent chunk marks a byte that nobody reads: which are resident is not to be predicted.
  std::vector<std::uint8_t> marks(used.size() + 2);
  const std::size_t absent = used.size();
  const std::size_t outside = used.size() + 1;
  std::size_t beyond = 0;
  const auto mark = [&](bool resident, std::int32_t slot) {
    const bool inside = static_cast<std::size_t>(slot) < used.size();
    marks[!resident ? absent : inside ? static_cast<std::size_t>(slot) : outside] = 1;
    beyond += resident && !inside ? 1 : 0;
  };
  if (layout_ == Layout::kHashed) {
    for (std::size_t at = 0; at < cells_; ++at) {
      mark(hashed_[at] != kEmpty, slotOf(hashed_[at]));
    }
  } else {
    for (std::int64_t key = 0; key < keys(); ++key) {
      const std::int32_t slot = find(key);
      mark(slot != kAbsent, slot);
    }
  }
  std::copy_n(marks.begin(), used.size(), used.begin());
  return beyond;
}

}  // namespace torchext::core
