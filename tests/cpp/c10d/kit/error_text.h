// errorOf() returns what a call throws, as text that a test can look into.
#pragma once

#include <exception>
#include <functional>
#include <string>

#include <c10/util/Exception.h>

namespace torchext::kit {

// Empty if `call` throws nothing.
inline std::string errorOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

inline bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace torchext::kit
