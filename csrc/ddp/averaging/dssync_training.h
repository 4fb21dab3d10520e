// dssyncTraining() fills a GroupSynchronizer with the groups of a ShuffleSchedule (shuffle_schedule.h), by step.
#pragma once

#include "c10d/backend/process_group_dssync.h"
#include "ddp/averaging/group_synchronizer.h"

namespace torchext {

GroupTraining dssyncTraining(const c10::intrusive_ptr<ProcessGroupDSSync>& group);

}  // namespace torchext
