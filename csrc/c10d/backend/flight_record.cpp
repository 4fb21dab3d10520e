#include "c10d/backend/flight_record.h"

#include <memory>
#include <numeric>
#include <tuple>
#include <utility>

#include <c10/util/StringUtil.h>

#include "c10d/backend/torch_compat.h"

#if TORCHEXT_C10D_FLIGHT_RECORDERS
#include <torch/csrc/distributed/c10d/FlightRecorderDetail.hpp>
#endif

namespace torchext {

#if TORCHEXT_C10D_FLIGHT_RECORDERS

namespace {

// Torch's hooks number process groups from 0. Entries of ours are of none of these.
constexpr std::size_t kProcessGroupId = 1 << 20;

// A dump needs one for each id. Nothing in it changes: the recorder reads it without a lock.
const std::shared_ptr<c10d::ProcessGroupStatus>& status() {
  static const auto instance = std::make_shared<c10d::ProcessGroupStatus>();
  return instance;
}

// Of `members`; none: of the whole group. A group made without torch.distributed has no global ranks: its own count.
std::vector<std::uint64_t> globalRanks(std::vector<std::uint64_t> all, int size, const std::vector<int>& members) {
  if (all.empty()) {
    all.resize(static_cast<std::size_t>(size));
    std::iota(all.begin(), all.end(), std::uint64_t{0});
  }
  if (members.empty()) {
    return all;
  }
  std::vector<std::uint64_t> ranks;
  ranks.reserve(members.size());
  for (const int member : members) {
    ranks.push_back(all.at(static_cast<std::size_t>(member)));
  }
  return ranks;
}

}  // namespace

void FlightRecord::done() {
  if (auto* recorder = std::exchange(recorder_, nullptr)) {
    const std::chrono::duration<float, std::milli> duration = std::chrono::steady_clock::now() - start_;
    recorder->retire_completed(id_, epoch_, duration.count());
  }
}

FlightLog::FlightLog(c10d::Backend& group)
    : group_(group), recorder_(c10d::getFlightRecorder(group.getBackendName())) {}

FlightRecord FlightLog::begin(const std::string& operation, const char* like, const std::vector<at::Tensor>& inputs,
                              const std::vector<at::Tensor>& outputs, const std::vector<int>& members) {
  FlightRecord record;
  if (!recorder_->enabled_) {
    return record;
  }
  const std::string listed = members.empty() ? "" : c10::str(" ", c10::Join(",", members));
  const auto name = std::make_tuple(c10::str(group_.getGroupUid(), "/", operation, listed), group_.getGroupDesc());
  const auto options = group_.getBackendOptions();
  std::uint64_t number = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    number = ++numbers_[std::get<0>(name)];
  }
  if (number == 1) {
    recorder_->record_pg_ranks(name, globalRanks(options->global_ranks_in_group, group_.getSize(), members));
  }
  const auto entry = recorder_->recordWithResetEnabled(
      kProcessGroupId, name, number, 0, number, c10::str(group_.getBackendName(), ":", operation, ":", like, listed),
      inputs, outputs, nullptr, nullptr, options->timeout, status(), false);
  record.recorder_ = recorder_;
  record.id_ = entry.id.value();
  record.epoch_ = entry.reset_epoch.value();
  record.start_ = std::chrono::steady_clock::now();
  return record;
}

#else

void FlightRecord::done() {}

FlightLog::FlightLog(c10d::Backend& group) : group_(group), recorder_(nullptr) {}

FlightRecord FlightLog::begin(const std::string& /*operation*/, const char* /*like*/,
                              const std::vector<at::Tensor>& /*inputs*/, const std::vector<at::Tensor>& /*outputs*/,
                              const std::vector<int>& /*members*/) {
  return {};
}

#endif

}  // namespace torchext
