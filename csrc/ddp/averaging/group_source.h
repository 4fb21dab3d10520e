// GroupSource: where a worker's next group comes from - prague's generator, or a schedule that every worker computes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "c10d/threads/outstanding_averages.h"
#include "core/prague/generator_messages.h"

namespace torchext {

using core::AssignedGroup;

class GroupSource {
 public:
  virtual ~GroupSource() = default;

  // Every worker computes its groups from the round: nobody is asked, and all must run the same rounds.
  virtual bool scheduled() const { return false; }
  virtual void ask() = 0;  // may be called early and more than once
  virtual AssignedGroup next(std::int64_t round) = 0;
  virtual void finished(const AssignedGroup& group) = 0;
  // Afterwards nobody counts on this worker until it asks again; `run` for each group that still did.
  virtual void pause(WaitingFor what, const std::function<void(const AssignedGroup&)>& run) = 0;
  virtual void stop(const std::string& reason) = 0;
};

// The sorted members of this worker's group in each round; the same function of (rank, round) on every rank.
using Schedule = std::function<std::vector<int>(std::int64_t round)>;
// Nobody is asked and nothing owed: every worker runs each round's group as it comes.
std::unique_ptr<GroupSource> makeScheduledSource(Schedule schedule);

}  // namespace torchext
