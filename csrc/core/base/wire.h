// Wire holds what the parsers of messages from peers share: bounds first, and one error for whatever breaks a rule.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <stdexcept>
#include <type_traits>

#include "core/base/check.h"

namespace torchext::core {

// A peer sent what no torchext of this version sends.
class MalformedMessage : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
[[noreturn]] void throwMalformed(const Parts&... parts) {
  throw MalformedMessage(concat("malformed ", parts...));
}

// The Message that `bytes` begin with, copied: they need no alignment.
template <typename Message>
Message readFront(std::span<const std::byte> bytes, const char* what) {
  static_assert(std::is_trivially_copyable_v<Message>);
  if (bytes.size() < sizeof(Message)) {
    throwMalformed(what, " of ", bytes.size(), " bytes: expected ", sizeof(Message), " or more");
  }
  Message message;
  std::memcpy(&message, bytes.data(), sizeof(message));
  return message;
}

}  // namespace torchext::core
