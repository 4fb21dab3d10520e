// check makes error messages with numbers: what was wrong, its value, what is allowed.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace torchext::core {

// "worker 9: allowed 0..7" from concat("worker ", 9, ": allowed 0..", 7).
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// std::invalid_argument "name = value: allowed allowed".
template <typename Value>
[[noreturn]] void throwInvalid(const char* name, const Value& value, const std::string& allowed) {
  throw std::invalid_argument(concat(name, " = ", value, ": allowed ", allowed));
}

// std::invalid_argument unless 0 < value < infinity.
inline void checkPositive(const char* name, double value) {
  if (!std::isfinite(value) || value <= 0) {
    throwInvalid(name, value, "finite, above 0");
  }
}

// std::out_of_range unless 0 <= value < count.
inline void checkIndex(const char* name, int value, int count) {
  if (value < 0 || value >= count) {
    throw std::out_of_range(concat(name, " = ", value, ": allowed 0..", count - 1));
  }
}

// A rank or a size that has been checked, as a container index.
constexpr std::size_t index(std::int64_t value) { return static_cast<std::size_t>(value); }

}  // namespace torchext::core
