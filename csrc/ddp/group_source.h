// GroupSource: where a worker's next group comes from - the generator's service, or the static schedule.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "c10d/generator_service.h"
#include "c10d/process_group_prague.h"

namespace torchext {

class GroupSource {
 public:
  virtual ~GroupSource() = default;

  virtual void ask() = 0;  // may be called early and more than once
  virtual AssignedGroup next(std::int64_t step) = 0;
  virtual void finished(const AssignedGroup& group) = 0;
  // Afterwards nobody counts on this worker until it asks again; `run` for each group that still did.
  virtual void pause(std::int64_t step, const std::function<void(const AssignedGroup&)>& run) = 0;
  virtual void stop(const std::string& reason) = 0;
};

// host_of[rank]: dense host index. tag_base: two tags on the control group, the same on all ranks.
std::unique_ptr<GroupSource> makeGroupSource(ProcessGroupPrague& group, const std::vector<int>& host_of, int tag_base);

}  // namespace torchext
