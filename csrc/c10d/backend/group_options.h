// GroupOptions: what every backend of ours takes besides its own options. How a group notices what goes wrong.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <tuple>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/backend/option_list.h"

namespace torchext {

struct GroupOptions : c10d::Backend::Options {
  using c10d::Backend::Options::Options;

  // A process that is stopped for longer (a debugger, Ctrl-Z) is a silent rank.
  std::chrono::milliseconds heartbeat_timeout{5000};
  // What each check costs and finds: call_check.h. Under TORCH_DISTRIBUTED_DEBUG=DETAIL "new" is "every".
  std::string call_check = "new";
  // `timeout` bounds every wait inside Gloo, for a part of the tensor, so an operation on a slow link goes on for as
  // long as bytes flow. Looked at twice a second.
  std::chrono::milliseconds operation_timeout{0};

  // What follows the own options of each backend.
  static auto commonList() {
    return std::tuple{
        option("heartbeat_timeout", &GroupOptions::heartbeat_timeout,
               "Silence after which a rank is suspected and the group fails, naming it; 0: never. 0.2 s to a day."),
        option(
            "call_check", &GroupOptions::call_check,
            R"(Which collectives of CPU tensors the ranks compare before they start: "new" (those that earlier calls )"
            R"(did not predict), "every", "lines" (every one, and its line of the script) or "off".)"),
        option("operation_timeout", &GroupOptions::operation_timeout,
               "How long a collective of CPU tensors may take altogether; 0: no limit. 0.5 s to a day."),
        option("timeout", &GroupOptions::timeout,
               "Of every single wait, as that of init_process_group, which comes before it."),
    };
  }

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
    oneOf({"new", "every", "lines", "off"})("call_check", call_check);
  }
};

}  // namespace torchext
