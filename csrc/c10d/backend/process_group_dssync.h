// ProcessGroupDSSync: the backend named "dssync" (Wang et al., "DS-Sync: Addressing Network Bottlenecks with
// Divide-and-Shuffle Synchronization for Distributed DNN Training", INFOCOM 2022).
//
// Every collective is DelegatingBackend's: exact, over all ranks. Models are trained through torchext.attach(): after
// each step the workers are divided into groups that average among themselves, and shuffled before the next; see
// csrc/core/dssync/shuffle_schedule.h for the schedules and csrc/ddp/averaging/group_synchronizer.h for the averages.
//
// Threads: racks() is collective and called by the thread that attaches; everything else from any.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "c10d/backend/attachable_backend.h"
#include "core/dssync/rack_map.h"

namespace torchext {

class ProcessGroupDSSync : public AttachableBackend {
 public:
  // Ranges are checked by validate(), before any communication.
  struct Options : GroupOptions {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout) : GroupOptions("dssync", timeout) {}

    std::int64_t group_size = 0;      // members a group aims for, 2..world size; 0: chosen by world size
    std::string schedule = "grid";    // grid | random | topology (core/dssync/shuffle_schedule.h)
    std::string order = "cta";        // "cta": average while computing, then step; "atc": local step, then average
    std::int64_t sync_period = 1;     // average after every n-th optimizer step, >= 1
    std::int64_t seed = 0;            // of "random"; the same on all ranks
    std::vector<std::int64_t> racks;  // "topology": the rack of each rank, any numbers; empty: measured when attaching
    double host_bandwidth = 0;        // with `racks`: of a host's link and of
    double uplink_bandwidth = 0;      //   the slowest rack's uplink, in one unit; 0, 0: equal
    bool shared_memory = true;        // groups on one host average through memory; each rank's own choice

    // Throws c10::ValueError with the option's name, its value and the allowed range.
    void validate() const;  // what can be checked without a world
    void validate(int world_size) const;
    // Changes what does not fit a group that has lost or gained ranks.
    void fit(int world_size);
    // NOLINTNEXTLINE(modernize-use-override): the options of torch 2.11 have none to override.
    c10::intrusive_ptr<c10d::Backend::Options> clone() const { return c10::make_intrusive<Options>(*this); }
    std::int64_t groupSizeFor(int world_size) const;
  };

  ProcessGroupDSSync(int rank, int size, InnerBackends inner, c10::intrusive_ptr<Options> options);
  ~ProcessGroupDSSync() override;

  const Options& dssyncOptions() const { return *dssync_options_; }

  // Which rank is in which rack, from the options or, in the first call, measured (link_probe.h) and kept.
  // Collective. host_of[rank]: dense host index.
  core::RackMap racks(const std::vector<int>& host_of);
  // What racks() found; empty before, and with other schedules.
  std::optional<core::RackMap> knownRacks() const;

 protected:
  c10::intrusive_ptr<c10d::Backend> createChild(int rank, int size, InnerBackends inner,
                                                c10::intrusive_ptr<c10d::Backend::Options> options) override;

 private:
  c10::intrusive_ptr<Options> dssync_options_;
  mutable std::mutex racks_mutex_;  // guards what follows
  std::optional<core::RackMap> racks_;
};

}  // namespace torchext
