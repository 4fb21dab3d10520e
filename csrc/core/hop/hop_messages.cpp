#include "core/hop/hop_messages.h"

#include <limits>

#include "core/base/wire.h"

namespace torchext::core {

HopMessage parseHopMessage(std::span<const std::byte> bytes, int source, std::uint64_t model_bytes,
                           std::uint64_t digest) {
  const auto message = readFront<HopMessage>(bytes, "message");
  // Half of the range: nobody computes that many iterations, and sums of two tags do not overflow.
  constexpr std::int64_t kLastTag = std::numeric_limits<std::int64_t>::max() / 2;
  const bool is_model = message.kind == HopMessage::kModel;
  const bool is_tokens = message.kind == HopMessage::kTokens;
  if (message.magic != HopMessage::kMagic || message.version != HopMessage::kVersion ||
      message.kind < HopMessage::kModel || message.kind > HopMessage::kLeave || message.sender != source ||
      message.tag < 0 || message.tag > kLastTag || (is_tokens ? message.count < 1 : message.count != 0) ||
      message.bytes != (is_model ? model_bytes : 0) || message.digest != digest) {
    throwMalformed("message from rank ", source, " (magic ", message.magic, ", version ", message.version, ", kind ",
                   message.kind, ", sender ", message.sender, ", count ", message.count, ", tag ", message.tag, ", ",
                   message.bytes, " bytes where a model has ", model_bytes, ", digest ", message.digest, ", here ",
                   digest, "): do all ranks run the same torchext, and attach the same model?");
  }
  return message;
}

}  // namespace torchext::core
