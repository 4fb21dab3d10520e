// Hop's messages have one fixed header, and behind that of a model its bytes.
//
//   model   `tag` is the iteration; `bytes` of the sender's model follow
//   tokens  the sender has entered iteration `tag`, `count` iterations after its last such message
//   ack     the sender has taken the receiver's model of iteration `tag` (notify-ack)
//   pause   the last message of this session: the sender has come to a point where all workers meet
//   leave   the last message of all: the sender has finished training
// Messages of one pair arrive in order. Iterations count from the begin of a session, which is the time between two
// points where all workers meet (attach, synchronize); it has the same number on all workers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace torchext::core {

struct HopMessage {
  static constexpr std::uint32_t kMagic = 0x54584850;  // "TXHP"
  static constexpr std::uint16_t kVersion = 1;
  enum Kind : std::uint16_t { kModel = 1, kTokens = 2, kAck = 3, kPause = 4, kLeave = 5 };

  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  std::uint16_t kind = kModel;
  std::int32_t sender = -1;
  std::int32_t count = 0;  // of tokens, 1 or more; else 0
  std::uint64_t session = 0;
  std::int64_t tag = 0;
  std::uint64_t bytes = 0;   // of a model; else 0
  std::uint64_t digest = 0;  // of shapes and dtypes: two models of equal size are not the same model
};
static_assert(sizeof(HopMessage) == 48, "the message is a wire format");

// The header that `source` sent. MalformedMessage, with what came, unless it keeps the rules above, its digest is
// `digest`, and a model has `model_bytes`. That session and tag fit is the receiver's question.
HopMessage parseHopMessage(std::span<const std::byte> bytes, int source, std::uint64_t model_bytes,
                           std::uint64_t digest);

}  // namespace torchext::core
