// Checks of a backend's options: c10::ValueError with the option's name, its value and what is allowed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace torchext {

inline void checkRange(const char* name, std::int64_t value, std::int64_t low, std::int64_t high, const char* meaning) {
  TORCH_CHECK_VALUE(value >= low && value <= high, name, " must be in [", low, ", ", high, "], got ", value, " (",
                    meaning, ")");
}

inline void checkChoice(const char* name, const std::string& value, const std::vector<std::string>& choices) {
  TORCH_CHECK_VALUE(std::find(choices.begin(), choices.end(), value) != choices.end(), name, " must be one of ",
                    c10::Join(", ", choices), "; got \"", value, "\"");
}

// Of an option that means nothing beside another: only its default can be told from a value that was given.
inline void checkUnset(const char* name, std::int64_t value, std::int64_t unset, const std::string& beside) {
  TORCH_CHECK_VALUE(value == unset, name, " = ", value, ": allowed ", unset, " (the default) with ", beside,
                    "; leave it out");
}

}  // namespace torchext
