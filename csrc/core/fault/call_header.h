// CallHeader is what one rank believes a collective to be. All ranks of a group must believe the same of their n-th
// call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

namespace torchext::core {

// Where in a program a call is: "train.py:31", zeros behind it. Empty: unknown, or not compared.
using CallLine = std::array<char, 32>;

// `text`, its end if it is too long, with a question mark for what is no printable ASCII.
CallLine makeCallLine(std::string_view text);
std::string_view textOf(const CallLine& line);

// Only what must be equal on all ranks is in it: of a call whose sizes may differ (all_to_all with splits), the kind.
struct CallHeader {
  std::uint8_t kind = 0;            // c10d::OpType
  std::uint8_t reduce_op = 0;       // c10d::ReduceOp, where the call reduces
  std::int16_t dtype = -1;          // c10::ScalarType; -1: none
  std::int32_t root = -1;           // -1: none
  std::int64_t numel = -1;          // of all tensors together; -1: may differ
  std::uint64_t shapes = kNoShape;  // hash of the shapes, where they matter
  CallLine line{};                  // of the caller, where ranks compare it

  static constexpr std::uint64_t kNoShape = 1469598103934665603ULL;

  bool operator==(const CallHeader&) const = default;
  // FNV-1a over all fields.
  std::uint64_t digest() const;
};
static_assert(sizeof(CallHeader) == 56 && std::has_unique_object_representations_v<CallHeader>,
              "the header is a wire format, and hashed as bytes");

// One step of FNV-1a, over a whole word.
constexpr std::uint64_t mixHash(std::uint64_t hash, std::uint64_t word) { return (hash ^ word) * 1099511628211ULL; }

// A header on its way.
struct CallMessage {
  static constexpr std::uint32_t kMagic = 0x54584843;  // "TXHC"

  std::uint32_t magic = kMagic;
  std::int32_t sender = -1;
  std::uint64_t number = 0;  // of the call, from 1
  CallHeader header;
};
static_assert(sizeof(CallMessage) == 72, "the message is a wire format");

// The message that `source` sent; MalformedMessage if it is none. Whether it fits the call is the receiver's question.
CallMessage parseCallMessage(std::span<const std::byte> bytes, int source);

}  // namespace torchext::core
