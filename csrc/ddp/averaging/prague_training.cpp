#include "ddp/averaging/prague_training.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "c10d/fault/explain_error.h"
#include "c10d/fault/local_error.h"
#include "core/prague/static_schedule.h"
#include "ddp/averaging/generator_client.h"
#include "ddp/averaging/generator_service.h"

namespace torchext {
namespace {

// The part of the group's timeout, which is for faults, that a wait for those who come back from a collective may take.
constexpr double kPartOfTimeout = 0.25;

class GeneratedSource : public GroupSource {
 public:
  GeneratedSource(ProcessGroupPrague& group, const core::GeneratorOptions& options, int tag_base)
      : service_(group.getRank() == 0
                     ? std::make_shared<GeneratorService>(group.controlTransport(), tag_base, options, tellAll(group))
                     : nullptr),
        client_(group.controlTransport(), tag_base, service_, group.timeout()) {}

  void ask() override {
    const std::lock_guard<std::mutex> lock(asking_);
    paused_ = false;
    met_ = false;
    client_.ask();
    asked_ = true;
  }
  AssignedGroup next(std::int64_t) override {
    asked_ = false;
    paused_ = false;
    met_ = false;
    return client_.awaitGroup();
  }
  void finished(const AssignedGroup& group) override { client_.finished(group.id); }
  void pause(WaitingFor what, const std::function<void(const AssignedGroup&)>& run) override {
    // A step of another thread asks when this is over.
    const std::lock_guard<std::mutex> lock(asking_);
    if (asked_) {
      // Asked for a step that never came (a skipped optimizer step): the group is ours all the same.
      const AssignedGroup group = next(0);
      run(group);
      finished(group);
    }
    const bool everybody = what == WaitingFor::kEverybody;
    if (everybody ? !met_ : !paused_) {
      client_.pauseAndDrain(what, run);
      paused_ = true;
      met_ = everybody;
    }
  }
  void stop(const std::string& reason) override {
    if (service_) {
      service_->stop(reason);
    }
  }

 private:
  // A broken connection is not news here: its member's next call says who is gone, if it was no orderly leave.
  static GeneratorService::ErrorFunction tellAll(ProcessGroupPrague& group) {
    return [health = group.health()](const std::exception_ptr& error) {
      if (localError(error)) {
        explainToAll(*health, error, OpInfo{.name = "the group generator"});
      }
    };
  }

  std::shared_ptr<GeneratorService> service_;
  GeneratorClient client_;
  std::mutex asking_;
  std::atomic<bool> asked_{false};
  std::atomic<bool> paused_{false};  // and nothing asked since
  std::atomic<bool> met_{false};     // the same, in front of a call that all make
};

std::unique_ptr<GroupSource> makeSource(ProcessGroupPrague& group, const std::vector<int>& host_of, int tag_base) {
  const ProcessGroupPrague::Options& options = group.pragueOptions();
  if (options.generator == "static" || group.getSize() == 1) {
    return makeScheduledSource([rank = group.getRank(), size = group.getSize(), host_of](std::int64_t round) {
      return core::staticGroup(rank, round, size, host_of);
    });
  }
  core::GeneratorOptions generator;
  generator.world_size = group.getSize();
  generator.group_size = static_cast<int>(options.groupSizeFor(group.getSize()));
  generator.kind = core::parseGeneratorKind(options.generator);
  generator.host_of = host_of;
  if (const auto racks = group.racks(host_of)) {
    generator.rack_of = racks->rackOfRanks();
  }
  generator.slowdown_threshold = options.slowdownThresholdFor();
  generator.sync_every = static_cast<std::uint64_t>(options.syncEveryFor());
  generator.seed = static_cast<std::uint64_t>(options.seed);
  const std::chrono::duration<double> timeout = group.timeout();
  generator.longest_wait = std::min(generator.longest_wait, kPartOfTimeout * timeout.count());
  return std::make_unique<GeneratedSource>(group, generator, tag_base);
}

}  // namespace

GroupTraining pragueTraining(const c10::intrusive_ptr<ProcessGroupPrague>& group) {
  const auto& options = group->pragueOptions();
  return {
      .group = group,
      .combine_then_adapt = options.order == "cta",
      .period = options.sync_period,
      .shared_memory = options.shared_memory,
      .fields = optionsAgreement(options, group->getSize()),
      .make_source = [raw = group.get()](const std::vector<int>& host_of,
                                         int tag_base) { return makeSource(*raw, host_of, tag_base); },
  };
}

}  // namespace torchext
