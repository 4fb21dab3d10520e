#include "core/pipeline/pipeline_program.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <utility>

#include "core/base/check.h"
#include "core/pipeline/pipeline_lowering.h"
#include "core/pipeline/pipeline_orders.h"

namespace torchext::core {
namespace {

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

PipelineProgram idealProgram(const PipelineTable& table) {
  PipelineProgram program;
  for (std::size_t rank = 0; rank < table.size(); ++rank) {
    auto& steps = program.emplace_back();
    for (const PipelineAction& action : table[rank]) {
      steps.push_back({action, false});
      const bool back = action.kind == ActionKind::kBackward || action.kind == ActionKind::kBackwardInput;
      if (action.kind == ActionKind::kForward && rank + 1 < table.size()) {
        steps.push_back({{ActionKind::kSendForward, action.stage, action.microbatch}, false});
      } else if (back && rank > 0) {
        steps.push_back({{ActionKind::kSendBackward, action.stage, action.microbatch}, false});
      }
    }
  }
  return program;
}

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
