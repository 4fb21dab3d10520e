#include "c10d/backend/process_group_dssync.h"

#include <algorithm>
#include <utility>

#include "c10d/backend/living_backends.h"

namespace torchext {
namespace {

// The racks of a child's members, who are named by their global ranks.
std::vector<std::int64_t> ofMembers(const ProcessGroupDSSync::Options& parent, const std::vector<uint64_t>& members) {
  const auto& ranks = parent.global_ranks_in_group;
  std::vector<std::int64_t> racks;
  for (const auto member : members) {
    const auto position = static_cast<std::size_t>(std::find(ranks.begin(), ranks.end(), member) - ranks.begin());
    TORCH_CHECK_VALUE(position < parent.racks.size(), "dssync: rank ", member,
                      " of a new group has no entry in the parent's DSSyncOptions.racks; pass options of its own");
    racks.push_back(parent.racks[position]);
  }
  return racks;
}

}  // namespace

void ProcessGroupDSSync::Options::validate() const {
  checkEach(*this);
  TORCH_CHECK_VALUE(group_size != 1,
                    "DSSyncOptions.group_size must be 0 or at least 2, got 1 (a group of one averages nothing)");
  TORCH_CHECK_VALUE(racks.empty() || schedule == "topology" || schedule == "auto",
                    "DSSyncOptions.racks is for schedule \"topology\", got \"", schedule,
                    "\"; leave it out, or change the schedule");
  TORCH_CHECK_VALUE((host_bandwidth > 0) == (uplink_bandwidth > 0),
                    "DSSyncOptions: host_bandwidth and uplink_bandwidth are given together, in one unit; got ",
                    host_bandwidth, " and ", uplink_bandwidth);
  TORCH_CHECK_VALUE(host_bandwidth == 0 || !racks.empty(),
                    "DSSyncOptions: host_bandwidth and uplink_bandwidth need racks; without them both are measured");
}

void ProcessGroupDSSync::Options::validate(int world_size) const {
  validate();
  TORCH_CHECK_VALUE(group_size <= std::max(world_size, 1), "DSSyncOptions.group_size must be at most ", world_size,
                    ", the group's ranks, got ", group_size, "; leave it out to have it chosen");
  TORCH_CHECK_VALUE(racks.empty() || racks.size() == static_cast<std::size_t>(world_size),
                    "DSSyncOptions.racks must have an entry for each of the ", world_size, " ranks, got ",
                    racks.size());
}

void ProcessGroupDSSync::Options::fit(int world_size) {
  group_size = group_size <= world_size && world_size > 1 ? group_size : 0;
}

std::int64_t ProcessGroupDSSync::Options::groupSizeFor(int world_size) const {
  if (group_size > 0) {
    return group_size;
  }
  // As prague's: pairs move the fewest bytes, groups of 4 keep many ranks together.
  return std::clamp(world_size, 2, world_size >= 16 ? 4 : 2);
}

ProcessGroupDSSync::ProcessGroupDSSync(int rank, int size, InnerBackends inner, c10::intrusive_ptr<Options> options)
    : AttachableBackend(rank, size, "dssync", std::move(inner), options), dssync_options_(std::move(options)) {
  dssync_options_->validate(size);
}

ProcessGroupDSSync::~ProcessGroupDSSync() { ProcessGroupDSSync::shutdown(); }

std::optional<core::RackMap> ProcessGroupDSSync::racks(const std::vector<int>& host_of) {
  const Options& given = *dssync_options_;
  const bool is_auto = given.schedule == "auto";
  if (!given.racks.empty()) {
    core::RackMap map = core::rackMapOf(host_of, given.racks);
    if (given.host_bandwidth > 0) {
      map.host_bandwidth = given.host_bandwidth;
      map.uplink_bandwidth.assign(map.uplink_bandwidth.size(), given.uplink_bandwidth);
    }
    racks_.set(map);
    return map;
  }
  if (given.schedule != "topology" && !(is_auto && KnownRacks::worthMeasuring(host_of))) {
    return std::nullopt;
  }
  core::RackMap map = racks_.measure(*this, host_of);
  return is_auto && !map.dividesHosts() ? std::nullopt : std::optional(std::move(map));
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupDSSync::createChild(int rank, int size, InnerBackends inner,
                                                                  c10::intrusive_ptr<c10d::Backend::Options> options) {
  auto own = childOptions(*dssync_options_, *options);
  own->fit(size);
  if (!own->racks.empty()) {
    own->racks = ofMembers(*dssync_options_, own->global_ranks_in_group);  // the parent's are of other ranks
  }
  return makeBackend<ProcessGroupDSSync>(rank, size, std::move(inner), std::move(own));
}

}  // namespace torchext
