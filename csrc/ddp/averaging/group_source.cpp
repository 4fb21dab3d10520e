#include "ddp/averaging/group_source.h"

#include <utility>

namespace torchext {
namespace {

class ScheduledSource : public GroupSource {
 public:
  explicit ScheduledSource(Schedule schedule) : schedule_(std::move(schedule)) {}

  bool scheduled() const override { return true; }
  void ask() override {}
  AssignedGroup next(std::int64_t round) override {
    return {static_cast<std::uint64_t>(round) + 1, schedule_(round), 0};
  }
  void finished(const AssignedGroup&) override {}
  void pause(WaitingFor, const std::function<void(const AssignedGroup&)>&) override {}
  void stop(const std::string&) override {}

 private:
  Schedule schedule_;
};

}  // namespace

std::unique_ptr<GroupSource> makeScheduledSource(Schedule schedule) {
  return std::make_unique<ScheduledSource>(std::move(schedule));
}

}  // namespace torchext
