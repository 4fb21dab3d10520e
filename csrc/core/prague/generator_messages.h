// Generator messages travel between the group generator's service and its clients; generator_service.h says when.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace torchext::core {

// What a worker tells the service.
struct GeneratorMessage {
  enum Kind : std::int32_t { kAsk = 1, kComplete = 2, kPause = 3, kMeet = 4 };
  static constexpr std::uint32_t kMagic = 0x54584747;  // "TXGG"

  std::uint32_t magic = kMagic;
  std::int32_t kind = kAsk;
  std::int32_t worker = -1;
  std::int32_t reserved = 0;
  std::uint64_t completed = 0;  // the group this worker has finished since its last message; 0: none
};
static_assert(sizeof(GeneratorMessage) == 24, "the message is a wire format");

// What a worker gets: its group, and how far it is behind the fastest worker (requests).
struct AssignedGroup {
  std::uint64_t id = 0;  // 0: the end of a drain, without members
  std::vector<int> members;
  std::int64_t behind = 0;
};

// MalformedMessage if it is none of a worker of 0..world_size-1.
GeneratorMessage parseGeneratorMessage(std::span<const std::byte> bytes, int world_size);

// The length of the longest delivery is that with world_size members.
std::size_t deliveryBytes(std::size_t members);
std::vector<std::byte> encodeDelivery(const AssignedGroup& group);
// MalformedMessage unless the members are sorted, unique ranks of 0..world_size-1, `rank` (the receiver) among them, or
// it is the end of a drain. `bytes` may be longer than the delivery.
AssignedGroup parseDelivery(std::span<const std::byte> bytes, int world_size, int rank);

}  // namespace torchext::core
