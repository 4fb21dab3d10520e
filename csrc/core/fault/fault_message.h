// FaultMessage tells the peers of a rank what ended their group, in a fixed size. Its sender is failure_monitor.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace torchext::core {

struct FaultMessage {
  // kFailure: about whom it may be, that one may live. kDeparture: it leaves while others count on it, as a script does
  // that ends. kAbort: its script wants an end at once, for everyone.
  enum class Kind : std::uint16_t { kPeerDied = 1, kLeave = 2, kFailure = 3, kDeparture = 4, kAbort = 5 };
  Kind kind = Kind::kFailure;
  int rank = -1;         // whom it is about: the rank that died or gave up; -1 when unknown
  int detected_by = -1;  // the rank that found out
  std::string reason;
};

// Longest reason that travels, in bytes; longer ones are cut.
constexpr std::size_t kMaxReason = 200;

// `reason` as it arrives at the peers: at most kMaxReason bytes, no character cut in two, no control characters.
std::string cutReason(std::string reason);

constexpr std::size_t kFaultMessageBytes = 256;
std::array<std::byte, kFaultMessageBytes> encodeFaultMessage(const FaultMessage& fault);
// MalformedMessage for one that breaks any rule, ranks outside 0..size-1 among them.
FaultMessage parseFaultMessage(std::span<const std::byte> bytes, int size);

}  // namespace torchext::core
