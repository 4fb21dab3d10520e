// pragueTraining() fills a GroupSynchronizer with P-Reduce (Luo et al., ASPLOS 2020, sections 3 to 5) over the groups
// of its generator, or of the static schedule.
#pragma once

#include "c10d/backend/process_group_prague.h"
#include "ddp/averaging/group_synchronizer.h"

namespace torchext {

GroupTraining pragueTraining(const c10::intrusive_ptr<ProcessGroupPrague>& group);

}  // namespace torchext
