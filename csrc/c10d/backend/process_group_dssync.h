// ProcessGroupDSSync: the backend named "dssync" (Wang et al., "DS-Sync: Addressing Network Bottlenecks with
// Divide-and-Shuffle Synchronization for Distributed DNN Training", INFOCOM 2022).
//
// Every collective is ForwardedCollectives': exact, over all ranks. Models are trained through torchext.attach(): after
// each step the workers are divided into groups that average among themselves, and shuffled before the next; see
// csrc/core/dssync/shuffle_schedule.h for the schedules and csrc/ddp/averaging/group_synchronizer.h for the averages.
//
// Threads: racks() is collective and called by the thread that attaches; everything else from any.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "c10d/backend/attachable_backend.h"
#include "c10d/backend/known_racks.h"
#include "c10d/backend/option_list.h"
#include "core/transport/rack_map.h"

namespace torchext {

class ProcessGroupDSSync : public AttachableBackend {
 public:
  // Ranges are checked by validate(), before any communication.
  struct Options : GroupOptions {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout) : GroupOptions("dssync", timeout) {}

    static constexpr const char* kName = "DSSyncOptions";

    std::int64_t group_size = 0;
    std::string schedule = "auto";  // core/dssync/shuffle_schedule.h
    std::string order = "cta";
    std::int64_t sync_period = 1;
    std::int64_t seed = 0;
    std::vector<std::int64_t> racks;
    double host_bandwidth = 0;
    double uplink_bandwidth = 0;
    bool shared_memory = true;

    static auto list() {
      return std::tuple{
          option("group_size", &Options::group_size,
                 "Members that a group aims for, 2 to the world size; 0: 2, and from 16 workers on 4.",
                 inRange(0, 1 << 20, "members of a group; 0 chooses by world size"), &Options::groupSizeFor),
          option("schedule", &Options::schedule,
                 R"("grid": along one side of a grid after another; "random": shuffled anew; "topology": mostly )"
                 R"(inside racks; "auto": "topology" where racks are given or, between 3 to 64 hosts, found, else )"
                 R"("grid".)",
                 oneOf({"auto", "grid", "random", "topology"})),
          option("order", &Options::order, R"("cta" or "atc", as with prague.)", oneOf({"atc", "cta"})),
          option("sync_period", &Options::sync_period, "Average after every n-th optimizer step, 1 or more.",
                 inRange(1, std::int64_t{1} << 40, "average after every n-th optimizer step")),
          option("seed", &Options::seed, R"(Of "random"; the other schedules ignore it.)",
                 inRange(0, INT64_MAX, "the same on all ranks")),
          option(
              "racks", &Options::racks,
              R"("topology": the rack of each rank, any numbers; empty: measured when the first model is attached.)"),
          option("host_bandwidth", &Options::host_bandwidth, "With ``racks``: of a host's link, in any unit.",
                 finite()),
          option("uplink_bandwidth", &Options::uplink_bandwidth,
                 "With ``racks``: of the slowest rack's uplink, in the same unit; both 0: equal. The two set how many "
                 "rounds stay inside the racks.",
                 finite()),
          option("shared_memory", &Options::shared_memory,
                 "Averages among ranks of one host go through memory. Each rank's own choice.", OwnChoice{}),
      };
    }

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

  // Which rank is in which rack, from the options or, in the first call, measured (link_probe.h) and kept. Nothing
  // where the schedule does not ask, or "auto" finds none. Collective. host_of[rank]: dense host index.
  std::optional<core::RackMap> racks(const std::vector<int>& host_of);
  // What racks() has found; empty before, and with schedules that do not ask.
  std::optional<core::RackMap> knownRacks() const { return racks_.get(); }

 protected:
  c10::intrusive_ptr<c10d::Backend> createChild(int rank, int size, InnerBackends inner,
                                                c10::intrusive_ptr<c10d::Backend::Options> options) override;

 private:
  c10::intrusive_ptr<Options> dssync_options_;
  KnownRacks racks_;
};

}  // namespace torchext
