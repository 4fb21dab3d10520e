#include "core/fault/heartbeat.h"

#include <cstring>

#include "core/base/wire.h"

namespace torchext::core {

std::uint32_t magicOf(std::span<const std::byte> bytes) {
  std::uint32_t magic = 0;
  if (bytes.size() >= sizeof(magic)) {
    std::memcpy(&magic, bytes.data(), sizeof(magic));
  }
  return magic;
}

Heartbeat parseHeartbeat(std::span<const std::byte> bytes, int source) {
  const auto message = readFront<Heartbeat>(bytes, "heartbeat");
  if (message.magic != Heartbeat::kMagic || message.sender != source) {
    throwMalformed("heartbeat from rank ", source, " (magic ", message.magic, ", sender ", message.sender, ")");
  }
  return message;
}

LaggardQuery parseLaggardQuery(std::span<const std::byte> bytes, int size) {
  const auto message = readFront<LaggardQuery>(bytes, "query");
  if (message.magic != LaggardQuery::kMagic || message.origin < 0 || message.origin >= size || message.laggard < -1 ||
      message.laggard >= size) {
    throwMalformed("query (magic ", message.magic, ", origin ", message.origin, ", laggard ", message.laggard, ")");
  }
  return message;
}

StepNotice parseStepNotice(std::span<const std::byte> bytes, int size) {
  const auto message = readFront<StepNotice>(bytes, "notice of steps");
  if (message.magic != StepNotice::kMagic || message.origin < 0 || message.origin >= size || message.model < 0 ||
      message.steps < 0) {
    throwMalformed("notice of steps (magic ", message.magic, ", origin ", message.origin, ", model ", message.model,
                   ", steps ", message.steps, ")");
  }
  return message;
}

std::optional<SilenceWatch::Duration> SilenceWatch::tick(Time now) {
  const Duration passed = last_ ? now - *last_ : interval_;
  last_ = now;
  if (!watching_) {
    return std::nullopt;
  }
  silence_ += passed > 2 * interval_ ? interval_ : passed;
  return silence_ >= limit_ ? std::optional<Duration>(silence_) : std::nullopt;
}

}  // namespace torchext::core
