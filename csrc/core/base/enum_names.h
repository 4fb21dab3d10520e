// EnumNames names an enumeration's values, in options and error messages: one table each, read in both directions.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <utility>

#include "core/base/check.h"

namespace torchext::core {

template <class Enum, std::size_t size>
using EnumNames = std::array<std::pair<Enum, const char*>, size>;

// The value of that name. std::invalid_argument naming `option`, the name and the choices.
template <class Enum, std::size_t size>
Enum parseEnum(const EnumNames<Enum, size>& names, const char* option, const std::string& name) {
  std::string choices;
  for (const auto& [value, value_name] : names) {
    if (name == value_name) {
      return value;
    }
    choices += (choices.empty() ? "" : ", ") + std::string(value_name);
  }
  throwInvalid(option, "\"" + name + "\"", choices);
}

// std::invalid_argument naming `type` on a number that is no value of it.
template <class Enum, std::size_t size>
const char* enumName(const EnumNames<Enum, size>& names, const char* type, Enum value) {
  for (const auto& [known, name] : names) {
    if (known == value) {
      return name;
    }
  }
  throwInvalid(type, static_cast<int>(value), concat("0..", size - 1));
}

}  // namespace torchext::core
