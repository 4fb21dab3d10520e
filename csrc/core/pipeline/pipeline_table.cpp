#include "core/pipeline/pipeline_table.h"

#include <algorithm>
#include <cstddef>

#include "core/base/check.h"
#include "core/base/enum_names.h"

namespace torchext::core {
namespace {

constexpr EnumNames<ActionKind, 8> kActionKinds{{{ActionKind::kForward, "F"},
                                                 {ActionKind::kBackward, "B"},
                                                 {ActionKind::kBackwardInput, "I"},
                                                 {ActionKind::kBackwardWeight, "W"},
                                                 {ActionKind::kSendForward, "SEND_F"},
                                                 {ActionKind::kReceiveForward, "RECV_F"},
                                                 {ActionKind::kSendBackward, "SEND_B"},
                                                 {ActionKind::kReceiveBackward, "RECV_B"}}};
constexpr EnumNames<OrderFamily, 3> kOrderFamilies{
    {{OrderFamily::k1F1B, "1f1b"}, {OrderFamily::kGPipe, "gpipe"}, {OrderFamily::kZeroBubble, "zero-bubble"}}};

// How far a micro-batch has come on its rank.
enum class Progress { kNew, kForwarded, kInputDone, kDone };

[[noreturn]] void throwAction(std::size_t rank, const PipelineAction& action, const std::string& allowed) {
  throw std::invalid_argument(concat("rank ", rank, ", action ", toString(action), ": ", allowed));
}

// What the action makes of a micro-batch; `allowed` where it cannot follow.
Progress progressAfter(Progress before, ActionKind kind, std::string& allowed) {
  switch (kind) {
    case ActionKind::kForward:
      allowed = before == Progress::kNew ? "" : "F comes once";
      return Progress::kForwarded;
    case ActionKind::kBackward:
      allowed = before == Progress::kForwarded ? "" : "B comes once, after its F, and not with I or W";
      return Progress::kDone;
    case ActionKind::kBackwardInput:
      allowed = before == Progress::kForwarded ? "" : "I comes once, after its F, and not with B";
      return Progress::kInputDone;
    case ActionKind::kBackwardWeight:
      allowed = before == Progress::kInputDone ? "" : "W comes once, after its I";
      return Progress::kDone;
    default:
      allowed = "allowed F, B, I and W: a table holds no sends and receives";
      return before;
  }
}

void checkRow(std::size_t rank, const std::vector<PipelineAction>& row, int microbatches) {
  std::vector<Progress> progress(index(microbatches), Progress::kNew);
  for (const PipelineAction& action : row) {
    if (action.stage != static_cast<int>(rank)) {
      throwAction(rank, action, concat("allowed stage ", rank, ", a rank has one stage"));
    }
    if (action.microbatch < 0 || action.microbatch >= microbatches) {
      throwAction(rank, action, concat("allowed micro-batches 0..", microbatches - 1, ", those that rank 0 forwards"));
    }
    std::string allowed;
    Progress& now = progress[index(action.microbatch)];
    now = progressAfter(now, action.kind, allowed);
    if (!allowed.empty()) {
      throwAction(rank, action, allowed);
    }
  }
  const auto open = std::ranges::find_if(progress, [](Progress now) { return now != Progress::kDone; });
  if (open != progress.end()) {
    throw std::invalid_argument(
        concat("rank ", rank, ": micro-batch ", open - progress.begin(), " has no ",
               *open == Progress::kNew ? "F" : (*open == Progress::kForwarded ? "B, and no I and W" : "W")));
  }
}

}  // namespace

const char* toString(ActionKind kind) { return enumName(kActionKinds, "kind", kind); }
ActionKind parseActionKind(const std::string& name) { return parseEnum(kActionKinds, "kind", name); }

std::string toString(const PipelineAction& action) {
  return concat(action.stage, toString(action.kind), action.microbatch);
}

const char* toString(OrderFamily family) { return enumName(kOrderFamilies, "schedule", family); }
OrderFamily parseOrderFamily(const std::string& name) { return parseEnum(kOrderFamilies, "schedule", name); }

int checkTable(const PipelineTable& table) {
  if (table.empty()) {
    throwInvalid("number of ranks of a table", 0, "1 or more");
  }
  const auto microbatches = static_cast<int>(std::ranges::count_if(
      table.front(), [](const PipelineAction& action) { return action.kind == ActionKind::kForward; }));
  if (microbatches == 0) {
    throwInvalid("number of micro-batches of a table", 0, "1 or more");
  }
  for (std::size_t rank = 0; rank < table.size(); ++rank) {
    checkRow(rank, table[rank], microbatches);
  }
  return microbatches;
}

std::vector<int> mostInFlight(const PipelineTable& table) {
  std::vector<int> most;
  for (const auto& row : table) {
    int now = 0;
    most.push_back(0);
    for (const PipelineAction& action : row) {
      now += action.kind == ActionKind::kForward ? 1 : 0;
      now -= action.kind == ActionKind::kBackward || action.kind == ActionKind::kBackwardWeight ? 1 : 0;
      most.back() = std::max(most.back(), now);
    }
  }
  return most;
}

}  // namespace torchext::core
