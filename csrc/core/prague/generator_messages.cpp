#include "core/prague/generator_messages.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "core/base/wire.h"

namespace torchext::core {
namespace {

struct DeliveryHeader {
  static constexpr std::uint32_t kMagic = 0x54584744;  // "TXGD"

  std::uint32_t magic = kMagic;
  std::int32_t member_count = 0;
  std::uint64_t id = 0;
  std::int64_t behind = 0;
};
static_assert(sizeof(DeliveryHeader) == 24, "the header is a wire format");

}  // namespace

GeneratorMessage parseGeneratorMessage(std::span<const std::byte> bytes, int world_size) {
  const auto message = readFront<GeneratorMessage>(bytes, "message to the group generator");
  const bool known_kind = message.kind >= GeneratorMessage::kAsk && message.kind <= GeneratorMessage::kMeet;
  if (message.magic != GeneratorMessage::kMagic || !known_kind || message.worker < 0 || message.worker >= world_size) {
    throwMalformed("message to the group generator (magic ", message.magic, ", kind ", message.kind, ", worker ",
                   message.worker, ")");
  }
  return message;
}

std::size_t deliveryBytes(std::size_t members) { return sizeof(DeliveryHeader) + members * sizeof(std::int32_t); }

std::vector<std::byte> encodeDelivery(const AssignedGroup& group) {
  static_assert(sizeof(int) == sizeof(std::int32_t));
  DeliveryHeader header;
  header.member_count = static_cast<std::int32_t>(group.members.size());
  header.id = group.id;
  header.behind = group.behind;
  std::vector<std::byte> bytes(deliveryBytes(group.members.size()));
  std::memcpy(bytes.data(), &header, sizeof(header));
  if (!group.members.empty()) {
    std::memcpy(bytes.data() + sizeof(header), group.members.data(), group.members.size() * sizeof(std::int32_t));
  }
  return bytes;
}

// No length or rank is believed before it is checked.
AssignedGroup parseDelivery(std::span<const std::byte> bytes, int world_size, int rank) {
  const auto header = readFront<DeliveryHeader>(bytes, "delivery from the group generator");
  if (header.magic != DeliveryHeader::kMagic || header.member_count < 0 || header.member_count > world_size ||
      bytes.size() < deliveryBytes(index(header.member_count))) {
    throwMalformed("delivery from the group generator (magic ", header.magic, ", ", header.member_count, " members in ",
                   bytes.size(), " bytes)");
  }
  AssignedGroup group{header.id, std::vector<int>(index(header.member_count)), header.behind};
  auto& members = group.members;
  if (!members.empty()) {
    std::memcpy(members.data(), bytes.data() + sizeof(header), members.size() * sizeof(std::int32_t));
  }
  const bool ascending = std::adjacent_find(members.begin(), members.end(), std::greater_equal<>()) == members.end();
  const bool are_ranks = members.empty() || (members.front() >= 0 && members.back() < world_size);
  const bool expected = group.id == 0 ? members.empty() : std::binary_search(members.begin(), members.end(), rank);
  if (!ascending || !are_ranks || !expected) {
    throwMalformed("delivery from the group generator: group ", group.id, " for rank ", rank, " has ", members.size(),
                   " members that are not sorted ranks of 0..", world_size - 1, " with it among them");
  }
  return group;
}

}  // namespace torchext::core
