// isConnectionError() reads an inner backend's error. Gloo's classes are not in the wheel, so types and texts must do.
#pragma once

#include <exception>
#include <string>
#include <string_view>

namespace torchext {

inline bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

// Whether the connection to a peer broke or waited too long, as opposed to a wrong call.
bool isConnectionError(const std::exception& error);

// The sentence of a Gloo error without the path of its source file and the advice after the first full stop.
std::string shortened(std::string_view text);

}  // namespace torchext
