// Option says everything about one option of a backend's own, in one place.
//
// An options class lists its own in a static function list(), in the order in which Python shows them. From the list
// follow the constructor and the attributes in Python (csrc/python/bind_group.h), their docstring, from that the
// reference page and the stub (tools/write_options.py), the check of each value, and what all ranks must have alike.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "c10d/transport/agreement.h"

namespace torchext {

// How Python gives a value, and gets it: as it is, or in a form of its own with the same functions.
template <class Value>
struct AsItIs {
  using Given = Value;
  static Value take(const std::string& /*name*/, Given given) { return given; }
  static Given give(const Value& value) { return value; }
};

// None for an empty list, which is not to be given.
template <class List>
struct ListOrNone {
  using Given = std::optional<List>;
  static List take(const std::string& name, Given given) {
    TORCH_CHECK_VALUE(!given || !given->empty(), name, " must have an entry for each rank, got []");
    return std::move(given).value_or(List{});
  }
  static Given give(const List& list) { return list.empty() ? std::nullopt : Given(list); }
};

// Throws c10::ValueError with the option's name, its value and what is allowed.
template <class Value>
using OptionCheck = std::function<void(const std::string& name, const Value& value)>;
// What must be the same on all ranks of a group of this size: the value that is used where the given one leaves it
// open.
template <class Owner, class Value>
using Resolved = std::function<Value(const Owner& options, int world_size)>;

template <class Owner, class ValueType, template <class> class Form>
struct Option {
  using Value = ValueType;
  using Given = typename Form<Value>::Given;

  const char* name;
  Value Owner::*field;
  const char* meaning;
  OptionCheck<Value> check;
  Resolved<Owner, Value> resolved;  // none: each rank has its own

  void take(Owner& options, const char* owner, Given given) const {
    options.*field = Form<Value>::take(c10::str(owner, ".", name), std::move(given));
  }
  Given give(const Owner& options) const { return Form<Value>::give(options.*field); }
};

// Of an option that each rank chooses for itself, or that is compared in another way.
struct OwnChoice {};

template <template <class> class Form = AsItIs, class Owner, class Value>
Option<Owner, Value, Form> option(const char* name, Value Owner::*field, const char* meaning,
                                  std::type_identity_t<OptionCheck<Value>> check,
                                  std::type_identity_t<Resolved<Owner, Value>> resolved) {
  return {name, field, meaning, std::move(check), std::move(resolved)};
}

template <template <class> class Form = AsItIs, class Owner, class Value>
Option<Owner, Value, Form> option(const char* name, Value Owner::*field, const char* meaning,
                                  std::type_identity_t<OptionCheck<Value>> check = {}) {
  return {name, field, meaning, std::move(check), [field](const Owner& options, int) { return options.*field; }};
}

template <template <class> class Form = AsItIs, class Owner, class Value>
Option<Owner, Value, Form> option(const char* name, Value Owner::*field, const char* meaning, OwnChoice,
                                  std::type_identity_t<OptionCheck<Value>> check = {}) {
  return {name, field, meaning, std::move(check), {}};
}

// meaning: of the numbers, for the message.
inline OptionCheck<std::int64_t> inRange(std::int64_t low, std::int64_t high, const char* meaning) {
  return [=](const std::string& name, std::int64_t value) {
    TORCH_CHECK_VALUE(value >= low && value <= high, name, " must be in [", low, ", ", high, "], got ", value, " (",
                      meaning, ")");
  };
}

inline OptionCheck<std::string> oneOf(std::vector<std::string> choices) {
  return [choices = std::move(choices)](const std::string& name, const std::string& value) {
    TORCH_CHECK_VALUE(std::find(choices.begin(), choices.end(), value) != choices.end(), name, " must be one of ",
                      c10::Join(", ", choices), "; got \"", value, "\"");
  };
}

inline OptionCheck<double> finite() {
  return [](const std::string& name, double value) {
    TORCH_CHECK_VALUE(std::isfinite(value) && value >= 0, name, " must be 0 or more and finite, got ", value);
  };
}

// Of an option that means nothing beside another: only its default can be told from a value that was given.
inline void checkUnset(const char* name, std::int64_t value, std::int64_t unset, const std::string& beside) {
  TORCH_CHECK_VALUE(value == unset, name, " = ", value, ": allowed ", unset, " (the default) with ", beside,
                    "; leave it out");
}

// Each value of Options::list().
template <class Options>
void checkEach(const Options& options) {
  const auto check = [&](const auto& listed) {
    if (listed.check) {
      listed.check(c10::str(Options::kName, ".", listed.name), options.*listed.field);
    }
  };
  std::apply([&](const auto&... listed) { (check(listed), ...); }, Options::list());
}

// What all ranks of a group of this size must have alike.
template <class Options>
AgreementFields optionsAgreement(const Options& options, int world_size) {
  AgreementFields fields;
  const auto add = [&](const auto& listed) {
    if (!listed.resolved) {
      return;
    }
    const auto value = listed.resolved(options, world_size);
    using Value = std::decay_t<decltype(value)>;
    const std::string name = c10::str(Options::kName, ".", listed.name);
    if constexpr (std::is_same_v<Value, std::vector<std::int64_t>>) {
      std::vector<std::string> texts;
      std::transform(value.begin(), value.end(), std::back_inserter(texts),
                     [](std::int64_t number) { return std::to_string(number); });
      fields.emplace_back(name, std::move(texts));
    } else if constexpr (std::is_arithmetic_v<Value> || std::is_same_v<Value, std::string>) {
      fields.emplace_back(name, value);
    } else {
      TORCH_INTERNAL_ASSERT(false, name, ": lists of lists are compared as what they describe");
    }
  };
  std::apply([&](const auto&... listed) { (add(listed), ...); }, Options::list());
  return fields;
}

}  // namespace torchext
