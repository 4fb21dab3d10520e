// ProcessGroupPrague: the backend named "prague" (Luo et al., "Prague: High-Performance Heterogeneity-Aware
// Asynchronous Decentralized Training", ASPLOS 2020).
//
// Every ordinary collective is ForwardedCollectives': exact, over all ranks. What Prague adds is P-Reduce,
// partialAllReduce(): an average over the members named in the call. Models are trained with it through
// torchext.attach(), see csrc/ddp/averaging/prague_training.h.
//
// The constructor is collective: ranks of one host find each other and share memory (shared_windows.h).
//
// Threads: partialAllReduce() checks its arguments on the caller's thread, then runs on one thread of this object, in
// call order. Started on first use. What is added to the future of its work runs elsewhere (callback_threads.h).
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "c10d/backend/attachable_backend.h"
#include "c10d/backend/known_racks.h"
#include "c10d/backend/option_list.h"
#include "c10d/threads/task_thread.h"
#include "c10d/transport/subset_allreduce.h"

namespace torchext {

class ProcessGroupPrague : public AttachableBackend {
 public:
  // How an attached model is averaged. Ranges are checked by validate(), before any communication.
  struct Options : GroupOptions {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout) : GroupOptions("prague", timeout) {}

    static constexpr const char* kName = "PragueOptions";

    std::int64_t group_size = 0;
    std::string generator = "smart";
    std::string order = "cta";
    std::int64_t slowdown_threshold = -1;
    std::int64_t sync_period = 1;
    std::int64_t sync_every = -1;
    std::int64_t seed = 0;
    bool shared_memory = true;

    static auto list() {
      constexpr std::int64_t kMost = std::int64_t{1} << 40;
      return std::tuple{
          option("group_size", &Options::group_size,
                 R"(Members of a group, 2 to the world size; 0: 2, and from 8 workers on 4. Not with "static".)",
                 inRange(0, 1 << 20, "members of a group; 0 chooses by world size"), &Options::groupSizeFor),
          option("generator", &Options::generator,
                 R"(Who makes the groups. "smart": "inter-intra" with several hosts, else "division". Where 3 to 64 )"
                 R"(hosts are found to be in several racks, most of its groups are inside one. "static": from rank )"
                 R"(and step, without a generator. "ready-set": whoever arrives together. Or "random".)",
                 oneOf({"random", "division", "inter-intra", "smart", "static", "ready-set"})),
          option("order", &Options::order,
                 R"("cta": the average is formed under the next forward and backward pass, and the step applies the )"
                 R"(gradient to it. "atc": step, then average; the next forward waits for it, module by module.)",
                 oneOf({"atc", "cta"})),
          option(
              "slowdown_threshold", &Options::slowdown_threshold,
              "Averages behind the others from which a worker is left out of their groups; 0: never; -1: 4. Not with "
              R"("random" and "static".)",
              inRange(-1, kMost, "iterations behind; 0 filters nobody, -1 is the default"),
              [](const Options& options, int) { return options.slowdownThresholdFor(); }),
          option("sync_period", &Options::sync_period, "Average after every n-th optimizer step, 1 or more.",
                 inRange(1, kMost, "average after every n-th optimizer step")),
          option(
              "sync_every", &Options::sync_every,
              R"(Every n-th division is one group of all workers; 0: never; -1: 16 with "ready-set", where the same )"
              R"(fast workers would keep meeting, else never. Not with "static".)",
              inRange(-1, kMost, "every n-th division is one of all workers; 0: never; -1: the generator's default")),
          option("seed", &Options::seed, R"(Of the generator. "static" and "ready-set" draw nothing, and ignore it.)",
                 inRange(0, INT64_MAX, "the same on all ranks")),
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
    std::int64_t slowdownThresholdFor() const;
    std::int64_t syncEveryFor() const;
  };

  ProcessGroupPrague(int rank, int size, InnerBackends inner, c10::intrusive_ptr<Options> options);
  ~ProcessGroupPrague() override;

  // Averages `tensor` in place over `members` (ranks of this group, the caller among them, any order, no repeats).
  // All members must call it with the same members, dtype and number of elements, in the same order relative to other
  // calls they share. Errors that this rank can see are thrown at once; a difference between members fails the work on
  // every member, with no buffer changed. One member: completes at once.
  c10::intrusive_ptr<c10d::Work> partialAllReduce(const at::Tensor& tensor, std::vector<int> members);

  const Options& pragueOptions() const { return *prague_options_; }

  // Which rank is in which rack, as far as "smart" needs to know: measured in the first call. Nothing with other
  // generators, or where no racks are found. Collective. host_of[rank]: dense host index.
  std::optional<core::RackMap> racks(const std::vector<int>& host_of);
  // What racks() has found; empty before, and with generators that do not ask.
  std::optional<core::RackMap> knownRacks() const { return racks_.get(); }

  // The ranks, this one among them, whose averages with it go through shared memory; of calls on the group itself.
  const std::vector<int>& sharedMemoryRanks() const { return shared_memory_ranks_; }

 protected:
  c10::intrusive_ptr<c10d::Backend> createChild(int rank, int size, InnerBackends inner,
                                                c10::intrusive_ptr<c10d::Backend::Options> options) override;
  void onShutdown() override;

 private:
  std::vector<int> checkMembers(std::vector<int> members) const;
  void checkTensor(const at::Tensor& tensor) const;
  void startPartialThread();

  c10::intrusive_ptr<Options> prague_options_;
  KnownRacks racks_;
  std::vector<int> shared_memory_ranks_;
  std::mutex mutex_;  // guards the fields below
  std::unique_ptr<SubsetAllreduce> partial_;
  std::unique_ptr<TaskThread> thread_;
  std::map<std::vector<int>, std::uint64_t> calls_;  // partial all-reduces so far, for each set of members
};

}  // namespace torchext
