#include "core/fault/fault_message.h"

#include <cstring>
#include <utility>

#include "core/base/wire.h"

namespace torchext::core {
namespace {

constexpr std::uint32_t kMagic = 0x54584d31;  // "TXM1"
constexpr std::uint16_t kVersion = 1;

struct Message {
  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  std::uint16_t kind = 0;
  std::int32_t rank = -1;
  std::int32_t detected_by = -1;
  std::uint64_t sequence = 0;
  std::uint32_t reason_length = 0;
  std::array<char, kMaxReason> reason = {};
  std::array<char, 28> padding = {};
};
static_assert(sizeof(Message) == kFaultMessageBytes, "the message is a wire format");

}  // namespace

std::string cutReason(std::string reason) {
  if (reason.size() > kMaxReason) {
    std::size_t end = kMaxReason;
    while (end > 0 && (static_cast<unsigned char>(reason[end]) & 0xC0U) == 0x80U) {  // inside a UTF-8 character
      --end;
    }
    reason.resize(end);
  }
  for (char& c : reason) {
    if (static_cast<unsigned char>(c) < 0x20) {
      c = ' ';
    }
  }
  return reason;
}

std::array<std::byte, kFaultMessageBytes> encodeFaultMessage(const FaultMessage& fault) {
  Message message;
  message.kind = static_cast<std::uint16_t>(fault.kind);
  message.rank = fault.rank;
  message.detected_by = fault.detected_by;
  const std::string reason = cutReason(fault.reason);
  message.reason_length = static_cast<std::uint32_t>(reason.size());
  std::memcpy(message.reason.data(), reason.data(), reason.size());
  std::array<std::byte, kFaultMessageBytes> bytes{};
  std::memcpy(bytes.data(), &message, sizeof(message));
  return bytes;
}

FaultMessage parseFaultMessage(std::span<const std::byte> bytes, int size) {
  const auto message = readFront<Message>(bytes, "message on the control group");
  const auto is_rank = [size](std::int32_t rank) { return rank >= 0 && rank < size; };
  const bool known_kind = message.kind >= static_cast<std::uint16_t>(FaultMessage::Kind::kPeerDied) &&
                          message.kind <= static_cast<std::uint16_t>(FaultMessage::Kind::kAbort);
  if (message.magic != kMagic || message.version != kVersion || !known_kind || !is_rank(message.detected_by) ||
      (message.rank != -1 && !is_rank(message.rank)) || message.reason_length > kMaxReason) {
    throwMalformed("message on the control group (magic ", message.magic, ", version ", message.version, ", kind ",
                   message.kind, ", rank ", message.rank, ", detected_by ", message.detected_by, ")");
  }
  FaultMessage fault;
  fault.kind = static_cast<FaultMessage::Kind>(message.kind);
  fault.rank = message.rank;
  fault.detected_by = message.detected_by;
  fault.reason = cutReason(std::string(message.reason.data(), message.reason_length));
  return fault;
}

}  // namespace torchext::core
