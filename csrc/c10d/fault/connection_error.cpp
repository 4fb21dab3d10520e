#include "c10d/fault/connection_error.h"

#include <algorithm>
#include <array>
#include <typeinfo>

namespace torchext {

// By the name of its type, or by its text where c10d wrapped it.
bool isConnectionError(const std::exception& error) {
  static constexpr std::array<std::string_view, 6> kSigns{"Connection closed by peer",
                                                          "Connection reset by peer",
                                                          "Application timeout caused",
                                                          "Timed out waiting",
                                                          "Broken pipe",
                                                          "Socket closed"};
  const std::string_view text = error.what();
  return contains(typeid(error).name(), "IoException") ||
         std::any_of(kSigns.begin(), kSigns.end(), [text](std::string_view sign) { return contains(text, sign); });
}

std::string shortened(std::string_view text) {
  if (!text.empty() && text.front() == '[') {
    if (const auto end = text.find("] "); end != std::string_view::npos) {
      text.remove_prefix(end + 2);
    }
  }
  text = text.substr(0, text.find(". This is typically"));
  text = text.substr(0, text.find('\n'));
  return std::string(text.substr(0, 160));
}

}  // namespace torchext
