// Tensors that carry a message of bytes, as PointToPoint sends and receives them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <ATen/ATen.h>

namespace torchext {

// Zeros: Gloo accepts a message that is too short, which must not be completed by one before.
inline at::Tensor emptyMessage(std::size_t bytes) { return at::zeros({static_cast<std::int64_t>(bytes)}, at::kByte); }

inline at::Tensor messageOf(std::span<const std::byte> bytes) {
  at::Tensor message = emptyMessage(bytes.size());
  std::memcpy(message.mutable_data_ptr(), bytes.data(), bytes.size());
  return message;
}

inline std::span<const std::byte> bytesOfMessage(const at::Tensor& message) {
  return {static_cast<const std::byte*>(message.const_data_ptr()), message.nbytes()};
}

}  // namespace torchext
