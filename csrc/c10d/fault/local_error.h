// localError() tells this process' own errors, of which the others have yet to hear, from those of its group.
#pragma once

#include <exception>
#include <optional>
#include <string>

namespace torchext {

// The text of an error that is this process' alone: memory that could not be had, a failed check, a bug. Nothing for
// the errors of torch.distributed, which say what has become of a group, and for what is no standard error: what a
// signal's handler has raised in Python, after which a script may go on.
std::optional<std::string> localError(const std::exception_ptr& error);

}  // namespace torchext
