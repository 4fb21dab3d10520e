// SubsetHeader stands in front of every collective over a subset: what the sender believes the call to be.
//
// Every member sees the header of every other before it trusts a payload, so that all members take the same decision:
// go on, or throw a mismatch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace torchext::core {

struct SubsetHeader {
  static constexpr std::uint32_t kMagic = 0x54585052;  // "TXPR"
  static constexpr std::uint16_t kVersion = 2;

  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  std::int16_t dtype = 0;  // of c10::ScalarType
  std::int32_t rank = -1;
  float scale = 1.0F;  // in a ring one member scales a chunk for all
  std::uint64_t call_id = 0;
  std::uint64_t members_hash = 0;
  std::int64_t numel = 0;
  std::uint32_t first_piece = 0;  // of the sender's shared window, where the call goes through windows
  std::uint32_t reserved = 0;

  bool sameCall(const SubsetHeader& other) const {
    return dtype == other.dtype && call_id == other.call_id && members_hash == other.members_hash &&
           numel == other.numel && scale == other.scale;
  }
};
static_assert(sizeof(SubsetHeader) == 48, "the header is a wire format");

// The header at the front of what `source` sent. MalformedMessage if it is none; that it fits the call is sameCall's
// question.
SubsetHeader parseSubsetHeader(std::span<const std::byte> bytes, int source);

// FNV-1a over the sorted members; stable across platforms.
inline std::uint64_t hashMembers(const std::vector<int>& members) {
  std::uint64_t hash = 1469598103934665603ULL;
  for (int member : members) {
    hash = (hash ^ static_cast<std::uint32_t>(member)) * 1099511628211ULL;
  }
  return hash;
}

}  // namespace torchext::core
