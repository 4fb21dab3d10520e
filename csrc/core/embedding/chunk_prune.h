// pruneChunks() carries out a selection of chunks on index, utilities and addresses, and lists what the pool must
// copy.
//
// Chunks leave their slots, then the new ones of each row get theirs. A row that grows moves as a whole into a free run
// where there is one, so that its chunks stay neighbours; else only the new chunks are placed. A pool that shrinks
// first empties the slots beyond its new end.
//
// The pool itself is the caller's: copy every move, then fill what was admitted. A slot may be source of one move and
// target of a later one, never of an earlier one, and none is the target of two: moves can be made in place, in their
// order.
#pragma once

#include <cstdint>
#include <vector>

#include "core/embedding/chunk_index.h"
#include "core/embedding/chunk_selection.h"
#include "core/embedding/chunk_utility.h"

namespace torchext::core {

struct ChunkMove {
  std::int32_t from = 0;
  std::int32_t to = 0;
};

struct ChunkAdmission {
  std::int32_t key = 0;
  std::int32_t slot = 0;
};

struct ChunkPrune {
  std::vector<ChunkMove> moves;
  std::vector<ChunkAdmission> admitted;  // by rising key
  std::vector<ChunkCandidate> dropped;   // with the slots they had
};

// Every chunk that a selection chooses from: all residents, and the absent ones that have collected utility.
// std::out_of_range where a hash or a sketch holds a key that the table does not have; so does pruneChunks, with
// nothing changed.
std::vector<ChunkCandidate> chunkCandidates(const ChunkIndex& index, const ChunkUtility& utility);

// std::invalid_argument for wrong limits or the identity layout, with nothing changed. limits.capacity is the number of
// slots of the pool afterwards.
ChunkPrune pruneChunks(ChunkIndex& index, ChunkUtility& utility, const SelectionLimits& limits);

}  // namespace torchext::core
