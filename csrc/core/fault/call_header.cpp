#include "core/fault/call_header.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/base/wire.h"

namespace torchext::core {
namespace {

bool isPrintable(char c) { return c >= 0x20 && c < 0x7f; }

bool isText(const CallLine& line) {
  const auto end = std::ranges::find(line, '\0');
  return end != line.end() && std::all_of(line.begin(), end, isPrintable) &&
         std::all_of(end, line.end(), [](char c) { return c == '\0'; });
}

}  // namespace

CallLine makeCallLine(std::string_view text) {
  CallLine line{};
  text.remove_prefix(text.size() - std::min(text.size(), line.size() - 1));
  std::ranges::transform(text, line.begin(), [](char c) { return isPrintable(c) ? c : '?'; });
  return line;
}

std::string_view textOf(const CallLine& line) {
  return {line.data(), static_cast<std::size_t>(std::ranges::find(line, '\0') - line.begin())};
}

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
  if (!isText(message.header.line)) {
    throwMalformed("call header from rank ", source, ": its line is no text");
  }
  return message;
}

}  // namespace torchext::core
