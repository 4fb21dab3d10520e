// Stands in for a JSON library that torch's FlightRecorderDetail.hpp includes and that torch's wheels do not ship.
//
// That header defines the flight recorder's functions, and we instantiate those that record. The one that writes JSON
// is not among them: what it names is declared here, and never defined. Searched after all other folders
// (-idirafter), so that the library itself is taken where there is one.
#pragma once

#include <string>

namespace nlohmann {

struct json {
  json& operator[](const std::string& key);
  template <class Value>
  json& operator=(const Value& value);
  std::string dump() const;
};

}  // namespace nlohmann
