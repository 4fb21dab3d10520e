// Parses what a peer sent: what csrc/core finds malformed becomes the error that torch.distributed knows.
#pragma once

#include <exception>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "core/base/wire.h"

namespace torchext {

// parser(arguments...); c10::DistBackendError "who: what is malformed".
template <typename Parser, typename... Arguments>
auto parseMessage(const char* who, Parser parser, Arguments&&... arguments) {
  try {
    return parser(std::forward<Arguments>(arguments)...);
  } catch (const core::MalformedMessage& error) {
    C10_THROW_ERROR(DistBackendError, c10::str(who, ": ", error.what()));
  }
}

// The same of what others wait for as well: refuse(text) ends the group on all ranks and returns the error to throw.
template <typename Refuse, typename Parser, typename... Arguments>
auto parseOrRefuse(const Refuse& refuse, Parser parser, Arguments&&... arguments) {
  try {
    return parser(std::forward<Arguments>(arguments)...);
  } catch (const core::MalformedMessage& error) {
    std::rethrow_exception(refuse(error.what()));
  }
}

}  // namespace torchext
