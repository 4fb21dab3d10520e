#include "ddp/averaging/dssync_training.h"

#include <memory>
#include <vector>

#include "core/dssync/shuffle_schedule.h"

namespace torchext {
namespace {

std::unique_ptr<GroupSource> makeSource(ProcessGroupDSSync& group, const std::vector<int>& host_of) {
  const auto& options = group.dssyncOptions();
  core::ShuffleOptions shuffle;
  shuffle.world_size = group.getSize();
  shuffle.group_size = static_cast<int>(options.groupSizeFor(group.getSize()));
  shuffle.seed = static_cast<std::uint64_t>(options.seed);
  shuffle.host_of = host_of;
  auto racks = group.racks(host_of);
  const char* const chosen = racks ? "topology" : "grid";
  shuffle.kind = core::parseShuffleKind(options.schedule == "auto" ? chosen : options.schedule);
  if (racks) {
    shuffle.host_of = std::move(racks->host_of);
    shuffle.rack_of = std::move(racks->rack_of);
    shuffle.host_bandwidth = racks->host_bandwidth;
    shuffle.uplink_bandwidth = std::move(racks->uplink_bandwidth);
  }
  return makeScheduledSource([rank = group.getRank(), schedule = core::ShuffleSchedule(std::move(shuffle))](
                                 std::int64_t round) { return schedule.groupOf(rank, round); });
}

}  // namespace

GroupTraining dssyncTraining(const c10::intrusive_ptr<ProcessGroupDSSync>& group) {
  const auto& options = group->dssyncOptions();
  return {
      .group = group,
      .combine_then_adapt = options.order == "cta",
      .period = options.sync_period,
      .shared_memory = options.shared_memory,
      .fields = optionsAgreement(options, group->getSize()),
      .make_source = [raw = group.get()](const std::vector<int>& host_of, int) { return makeSource(*raw, host_of); },
  };
}

}  // namespace torchext
