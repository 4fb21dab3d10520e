#include "ddp/group_source.h"

#include <atomic>
#include <utility>

#include "core/static_schedule.h"

namespace torchext {
namespace {

class StaticSource : public GroupSource {
 public:
  StaticSource(int rank, int world_size, std::vector<int> host_of)
      : rank_(rank), world_size_(world_size), host_of_(std::move(host_of)) {}

  void ask() override {}
  AssignedGroup next(std::int64_t step) override {
    return {static_cast<std::uint64_t>(step) + 1, core::staticGroup(rank_, step, world_size_, host_of_), 0};
  }
  void finished(const AssignedGroup&) override {}
  // Every worker runs every step's group as it comes: nothing is promised beyond it.
  void pause(std::int64_t, const std::function<void(const AssignedGroup&)>&) override {}
  void stop(const std::string&) override {}

 private:
  int rank_;
  int world_size_;
  std::vector<int> host_of_;
};

class GeneratedSource : public GroupSource {
 public:
  GeneratedSource(ProcessGroupPrague& group, const core::GeneratorOptions& options, int tag_base)
      : service_(group.getRank() == 0 ? std::make_shared<GeneratorService>(group.controlTransport(), tag_base, options)
                                      : nullptr),
        client_(group.controlTransport(), tag_base, service_, group.timeout()) {}

  void ask() override {
    paused_ = false;
    client_.ask();
    asked_ = true;
  }
  AssignedGroup next(std::int64_t) override {
    asked_ = false;
    paused_ = false;
    return client_.awaitGroup();
  }
  void finished(const AssignedGroup& group) override { client_.finished(group.id); }
  void pause(std::int64_t, const std::function<void(const AssignedGroup&)>& run) override {
    if (asked_) {
      // Asked for a step that never came (a skipped optimizer step): the group is ours all the same.
      const AssignedGroup group = next(0);
      run(group);
      finished(group);
    }
    if (!paused_) {
      client_.pauseAndDrain(run);
      paused_ = true;
    }
  }
  void stop(const std::string& reason) override {
    if (service_) {
      service_->stop(reason);
    }
  }

 private:
  std::shared_ptr<GeneratorService> service_;
  GeneratorClient client_;
  std::atomic<bool> asked_{false};
  std::atomic<bool> paused_{false};  // and nothing asked since
};

}  // namespace

std::unique_ptr<GroupSource> makeGroupSource(ProcessGroupPrague& group, const std::vector<int>& host_of, int tag_base) {
  const ProcessGroupPrague::Options& options = group.pragueOptions();
  if (options.generator == "static" || group.getSize() == 1) {
    return std::make_unique<StaticSource>(group.getRank(), group.getSize(), host_of);
  }
  core::GeneratorOptions generator;
  generator.world_size = group.getSize();
  generator.group_size = static_cast<int>(options.groupSizeFor(group.getSize()));
  generator.kind = core::parseGeneratorKind(options.generator);
  generator.host_of = host_of;
  generator.slowdown_threshold = options.slowdownThresholdFor();
  generator.sync_every = static_cast<std::uint64_t>(options.syncEveryFor());
  generator.seed = static_cast<std::uint64_t>(options.seed);
  return std::make_unique<GeneratedSource>(group, generator, tag_base);
}

}  // namespace torchext
