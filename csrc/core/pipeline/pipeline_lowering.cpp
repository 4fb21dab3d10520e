#include "core/pipeline/pipeline_lowering.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <utility>

#include "core/base/check.h"
#include "core/pipeline/pipeline_orders.h"

namespace torchext::core {
namespace {

bool isForward(const PipelineAction& action) { return action.kind == ActionKind::kForward; }

bool sendsBack(const PipelineAction& action) {
  return action.kind == ActionKind::kBackward || action.kind == ActionKind::kBackwardInput;
}

class Lowering {
 public:
  Lowering(const PipelineTable& table, int microbatches)
      : table_(table), stages_(table.size()), microbatches_(index(microbatches)), next_(stages_, 0), lowered_(stages_) {
    inputs_.assign(stages_ * microbatches_, false);
    gradients_.assign(stages_ * microbatches_, false);
  }

  PipelineTable lowered() {
    while (turn()) {
    }
    for (std::size_t rank = 0; rank < stages_; ++rank) {
      if (next_[rank] < table_[rank].size()) {
        throw std::invalid_argument(concat("deadlock: rank ", rank, " waits for ever at action ", next_[rank], ", ",
                                           toString(table_[rank][next_[rank]]),
                                           ", for what its neighbour would do later"));
      }
    }
    return std::move(lowered_);
  }

 private:
  std::size_t place(std::size_t rank, const PipelineAction& action) const {
    return rank * microbatches_ + index(action.microbatch);
  }

  bool ready(std::size_t rank, const PipelineAction& action) const {
    if (isForward(action)) {
      return rank == 0 || inputs_[place(rank, action)];
    }
    return !sendsBack(action) || rank + 1 == stages_ || gradients_[place(rank, action)];
  }

  // Each rank at most one action. False: none had one.
  bool turn() {
    bool progress = false;
    for (std::size_t rank = 0; rank < stages_; ++rank) {
      if (next_[rank] < table_[rank].size() && ready(rank, table_[rank][next_[rank]])) {
        take(rank, table_[rank][next_[rank]]);
        ++next_[rank];
        progress = true;
      }
    }
    return progress;
  }

  void take(std::size_t rank, const PipelineAction& action) {
    lowered_[rank].push_back(action);
    if (isForward(action) && rank + 1 < stages_) {
      lowered_[rank].push_back({ActionKind::kSendForward, action.stage, action.microbatch});
      lowered_[rank + 1].push_back({ActionKind::kReceiveForward, action.stage + 1, action.microbatch});
      inputs_[place(rank + 1, action)] = true;
    }
    if (sendsBack(action) && rank > 0) {
      lowered_[rank].push_back({ActionKind::kSendBackward, action.stage, action.microbatch});
      lowered_[rank - 1].push_back({ActionKind::kReceiveBackward, action.stage - 1, action.microbatch});
      gradients_[place(rank - 1, action)] = true;
    }
  }

  const PipelineTable& table_;
  std::size_t stages_;
  std::size_t microbatches_;
  std::vector<std::size_t> next_;  // [rank] its next action
  std::vector<bool> inputs_;       // [rank][micro-batch] the receive is in its list
  std::vector<bool> gradients_;
  PipelineTable lowered_;
};

// One rank of a class: computations with the receives and sends around them.
class ClassRow {
 public:
  ClassRow(int stage, int stages) : stage_(stage), first_(stage == 0), last_(stage + 1 == stages) {}

  void receiveForward(int m) { add(!first_, ActionKind::kReceiveForward, m); }
  void receiveBackward(int m) { add(!last_, ActionKind::kReceiveBackward, m); }
  void sendForward(int m) { add(!last_, ActionKind::kSendForward, m); }
  void sendBackward(int m) { add(!first_, ActionKind::kSendBackward, m); }
  void forward(int m) { add(true, ActionKind::kForward, m); }
  void backward(int m) { add(true, ActionKind::kBackward, m); }
  void awaitForward(int m) { await(!last_ && m >= 0, ActionKind::kSendForward, m); }
  void awaitBackward(int m) { await(!first_ && m >= 0, ActionKind::kSendBackward, m); }

  std::vector<ProgramStep> steps;

 private:
  void add(bool exists, ActionKind kind, int m) {
    if (exists) {
      steps.push_back({{kind, stage_, m}, false});
    }
  }
  void await(bool exists, ActionKind kind, int m) {
    if (exists) {
      steps.push_back({{kind, stage_, m}, true});
    }
  }

  int stage_;
  bool first_;
  bool last_;
};

// Schedule1F1B._step_microbatches.
std::vector<ProgramStep> row1F1B(int stage, int stages, int microbatches) {
  ClassRow row(stage, stages);
  const int warm_up = std::min(microbatches, stages - stage);
  for (int m = 0; m < warm_up; ++m) {
    row.receiveForward(m);
    row.forward(m);
    row.awaitForward(m - 1);
    if (m + 1 < warm_up) {
      row.sendForward(m);
    }
  }
  int forwards = warm_up;
  for (int m = 0; m < microbatches; ++m) {
    const bool steady = m <= microbatches - warm_up;  // an F came just before
    if (steady) {
      row.sendForward(forwards - 1);
    }
    row.receiveBackward(m);
    if (steady) {
      row.awaitForward(forwards - 1);
    }
    row.backward(m);
    if (forwards < microbatches) {
      row.sendBackward(m);
      row.receiveForward(forwards);
      row.awaitBackward(m);
      row.forward(forwards++);
    } else {
      row.awaitBackward(steady ? -1 : m - 1);
      row.sendBackward(m);
    }
  }
  row.awaitBackward(microbatches - 1);
  return std::move(row.steps);
}

// ScheduleGPipe._step_microbatches.
std::vector<ProgramStep> rowGPipe(int stage, int stages, int microbatches) {
  ClassRow row(stage, stages);
  for (int m = 0; m < microbatches; ++m) {
    row.receiveForward(m);
    row.forward(m);
    row.sendForward(m);
  }
  row.awaitForward(microbatches - 1);
  for (int m = 0; m < microbatches; ++m) {
    row.receiveBackward(m);
    row.backward(m);
    row.sendBackward(m);
  }
  row.awaitBackward(microbatches - 1);
  return std::move(row.steps);
}

}  // namespace

PipelineTable lowerTable(const PipelineTable& table) { return Lowering(table, checkTable(table)).lowered(); }

PipelineProgram runtimeProgram(const PipelineTable& table) {
  PipelineProgram program;
  for (const auto& row : lowerTable(table)) {
    auto& steps = program.emplace_back();
    for (const PipelineAction& action : row) {
      steps.push_back({action, false});
    }
  }
  return program;
}

PipelineProgram classProgram(const PipelineTable& table) {
  const int microbatches = checkTable(table);
  const auto stages = static_cast<int>(table.size());
  const bool gpipe = table == gpipeTable(stages, microbatches);
  if (!gpipe && table != depthTable(classDepths(stages, microbatches), microbatches)) {
    throw std::invalid_argument(R"(mode "class": allowed tables in the order of Schedule1F1B or ScheduleGPipe)");
  }
  PipelineProgram program;
  for (int stage = 0; stage < stages; ++stage) {
    program.push_back(gpipe ? rowGPipe(stage, stages, microbatches) : row1F1B(stage, stages, microbatches));
  }
  return program;
}

}  // namespace torchext::core
