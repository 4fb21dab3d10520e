// GroupOptions: what every backend of ours takes besides its own options. How a group notices what goes wrong.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/backend/option_checks.h"

namespace torchext {

struct GroupOptions : c10d::Backend::Options {
  using c10d::Backend::Options::Options;

  // Silence after which a rank is suspected and the group fails, naming it; 0: never. 200 ms or more. A process that is
  // stopped for longer (a debugger, Ctrl-Z) is such a rank.
  std::chrono::milliseconds heartbeat_timeout{5000};
  // Which collectives of CPU tensors the ranks agree on before they start (call_check.h): "new": those that the calls
  // so far did not predict, which finds every difference; "every": all, so that on a difference no rank has touched its
  // buffers, at a round of messages a call; "lines": the same, and all must
  // call from the same line of the script; "off": none. Under TORCH_DISTRIBUTED_DEBUG=DETAIL "new" is "every".
  std::string call_check = "new";
  // How long a collective of CPU tensors may take altogether; 0: no limit. `timeout` bounds every wait inside Gloo, for
  // a part of the tensor, so an operation on a slow link goes on for as long as bytes flow. Half a second or more;
  // looked at twice a second.
  std::chrono::milliseconds operation_timeout{0};

  // c10::ValueError with the option's name, its value and the allowed range. All ranks must have the same values.
  void validateGroup() const {
    TORCH_CHECK_VALUE(timeout.count() > 0, "timeout must be more than 0, got ",
                      static_cast<double>(timeout.count()) / 1e3, " s");
    const auto beat = static_cast<std::int64_t>(heartbeat_timeout.count());
    TORCH_CHECK_VALUE(beat == 0 || (beat >= 200 && beat <= 86'400'000),
                      "heartbeat_timeout must be 0 (off) or from 0.2 s to a day, got ", static_cast<double>(beat) / 1e3,
                      " s");
    const auto total = static_cast<std::int64_t>(operation_timeout.count());
    TORCH_CHECK_VALUE(total == 0 || (total >= 500 && total <= 86'400'000),
                      "operation_timeout must be 0 (no limit) or from 0.5 s to a day, got ",
                      static_cast<double>(total) / 1e3, " s");
    checkChoice("call_check", call_check, {"new", "every", "lines", "off"});
  }
};

}  // namespace torchext
