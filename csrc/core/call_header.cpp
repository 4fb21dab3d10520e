#include "core/call_header.h"

#include <array>
#include <cstring>

#include "core/wire.h"

namespace torchext::core {

std::uint64_t CallHeader::digest() const {
  std::array<std::uint64_t, sizeof(CallHeader) / sizeof(std::uint64_t)> words{};
  std::memcpy(words.data(), this, sizeof(*this));
  std::uint64_t hash = kNoShape;
  for (const std::uint64_t word : words) {
    hash = mixHash(hash, word);
  }
  return hash;
}

CallMessage parseCallMessage(std::span<const std::byte> bytes, int source) {
  const auto message = readFront<CallMessage>(bytes, "call header");
  if (message.magic != CallMessage::kMagic || message.sender != source || message.number == 0) {
    throwMalformed("call header from rank ", source, " (magic ", message.magic, ", sender ", message.sender,
                   ", number ", message.number, "): do all ranks run the same torchext?");
  }
  return message;
}

}  // namespace torchext::core
