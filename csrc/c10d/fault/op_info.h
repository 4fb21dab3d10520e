// OpInfo: one call on a group, as the fault model knows it and as error messages tell it.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "core/fault/call_header.h"

namespace torchext {

struct OpInfo {
  const char* name = "";  // a literal: "all_reduce"
  c10d::OpType type = c10d::OpType::UNKNOWN;
  uint64_t sequence = 0;  // of collectives on this group, from 1; 0 for point-to-point
  int peer = -1;          // the other rank of a point-to-point call, -1 when any or none
  // A wait that is always there (a service for requests of peers): shutdown ends it at once, it counts as no work, and
  // without a timeout it lasts for ever.
  bool background = false;
  // Part of a call that is under way: goes on while the group is closing.
  bool nested = false;
  // When the operation takes longer the group fails, with the rank named that has not come; 0: no limit here. A clock
  // of half a second; Gloo's own timeouts do not need it.
  std::chrono::milliseconds limit{0};
  // What it exchanges, and when it was called, for detailsOf(); nothing for waits that are no call of the user's.
  std::optional<core::CallHeader> header{};
  std::chrono::steady_clock::time_point since{};
};

// "all_reduce #17", "send with rank 2"
std::string nameOf(const OpInfo& op);
// " (sum, float32, 10 elements; 0.4 s after the call)"; empty where there is no header.
std::string detailsOf(const OpInfo& op);
// What an operation that has passed its limit was waiting for.
std::string latenessOf(const OpInfo& op);

}  // namespace torchext
