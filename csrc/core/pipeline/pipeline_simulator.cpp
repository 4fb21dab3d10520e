#include "core/pipeline/pipeline_simulator.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <utility>

#include "core/base/check.h"
#include "core/base/enum_names.h"
#include "core/pipeline/pipeline_program.h"
#include "core/pipeline/transfer_network.h"

namespace torchext::core {
namespace {

constexpr EnumNames<PipelineMode, 3> kPipelineModes{
    {{PipelineMode::kIdeal, "ideal"}, {PipelineMode::kTorch, "torch"}, {PipelineMode::kClass, "class"}}};

PipelineProgram programOf(const PipelineTable& table, PipelineMode mode) {
  switch (mode) {
    case PipelineMode::kTorch:
      return runtimeProgram(table);
    case PipelineMode::kClass:
      return classProgram(table);
    default:
      return idealProgram(table);
  }
}

class Simulation {
 public:
  Simulation(const std::vector<StageTimes>& stages, const PipelineProgram& program, int microbatches, bool ideal,
             bool with_timeline)
      : stages_(stages),
        program_(program),
        network_(stages, index(microbatches), ideal),
        next_(stages.size(), 0),
        now_(stages.size(), 0.0),
        busy_(stages.size(), 0.0),
        end_(stages.size(), 0.0),
        splits_(stages.size(), false),
        with_timeline_(with_timeline) {}

  PipelineRun run() {
    do {
      advanceAll();
    } while (network_.advance());
    checkDone();
    PipelineRun run;
    for (std::size_t rank = 0; rank < stages_.size(); ++rank) {
      const double sync = splits_[rank] ? stages_[rank].split_sync_seconds : stages_[rank].sync_seconds;
      run.seconds = std::max(run.seconds, end_[rank] + sync);
      run.bubble += busy_[rank];
    }
    run.bubble = run.seconds > 0 ? 1 - run.bubble / (static_cast<double>(stages_.size()) * run.seconds) : 0;
    run.end_seconds = std::move(end_);
    if (with_timeline_) {
      addTransfers(run);
      run.spans = std::move(spans_);
      std::ranges::stable_sort(run.spans, {}, &PipelineSpan::rank);
    }
    return run;
  }

 private:
  void advanceAll() {
    for (bool progress = true; progress;) {
      progress = false;
      for (std::size_t rank = 0; rank < stages_.size(); ++rank) {
        progress |= advance(rank);
      }
    }
  }

  // All steps that nothing holds up. False: none.
  bool advance(std::size_t rank) {
    const std::size_t before = next_[rank];
    while (next_[rank] < program_[rank].size() && step(rank, program_[rank][next_[rank]])) {
      ++next_[rank];
    }
    return next_[rank] > before;
  }

  bool step(std::size_t rank, const ProgramStep& step) {
    const int m = step.action.microbatch;
    switch (step.action.kind) {
      case ActionKind::kReceiveForward:
        network_.postForward(rank, now_[rank]);
        return true;
      case ActionKind::kReceiveBackward:
        network_.postBackward(rank, now_[rank]);
        return true;
      case ActionKind::kSendForward:
        if (step.waits) {
          return waitUntil(rank, network_.forward(rank).arrived(m));
        }
        network_.sendForward(rank, m, now_[rank]);
        return true;
      case ActionKind::kSendBackward:
        if (step.waits) {
          return waitUntil(rank, network_.backward(rank - 1).arrived(m));
        }
        network_.sendBackward(rank, m, now_[rank]);
        return true;
      default:
        return waitUntil(rank, inputArrived(rank, step.action)) && compute(rank, step.action);
    }
  }

  double inputArrived(std::size_t rank, const PipelineAction& action) const {
    switch (action.kind) {
      case ActionKind::kForward:
        return rank == 0 ? 0 : network_.forward(rank - 1).arrived(action.microbatch);
      case ActionKind::kBackwardWeight:
        return 0;
      default:
        return rank + 1 == stages_.size() ? 0 : network_.backward(rank).arrived(action.microbatch);
    }
  }

  bool waitUntil(std::size_t rank, double seconds) {
    if (seconds == TransferLink::kUnknown) {
      return false;
    }
    now_[rank] = std::max(now_[rank], seconds);
    return true;
  }

  bool compute(std::size_t rank, const PipelineAction& action) {
    const double begin = now_[rank];
    const double seconds = duration(stages_[rank], action.kind);
    now_[rank] += seconds;
    busy_[rank] += seconds;
    end_[rank] = now_[rank];
    splits_[rank] = action.kind == ActionKind::kBackwardWeight;
    if (with_timeline_) {
      spans_.push_back({static_cast<int>(rank), action, begin, now_[rank]});
    }
    return true;
  }

  static double duration(const StageTimes& stage, ActionKind kind) {
    switch (kind) {
      case ActionKind::kForward:
        return stage.forward_seconds;
      case ActionKind::kBackwardInput:
        return stage.backward_input_seconds;
      case ActionKind::kBackwardWeight:
        return stage.backward_weight_seconds;
      default:
        return stage.backward_seconds;
    }
  }

  void checkDone() const {
    for (std::size_t rank = 0; rank < program_.size(); ++rank) {
      if (next_[rank] < program_[rank].size()) {
        const ProgramStep& step = program_[rank][next_[rank]];
        const auto done =
            std::count_if(program_[rank].begin(), program_[rank].begin() + static_cast<std::ptrdiff_t>(next_[rank]),
                          [](const ProgramStep& before) { return before.action.kind <= ActionKind::kBackwardWeight; });
        throw std::invalid_argument(concat("deadlock: rank ", rank, " waits for ever at action ", done, ", ",
                                           toString(step.action), ", for what its neighbour would do later"));
      }
    }
  }

  void addTransfers(PipelineRun& run) const {
    for (std::size_t rank = 0; rank < program_.size(); ++rank) {
      const auto first = static_cast<std::ptrdiff_t>(run.transfers.size());
      for (const ProgramStep& step : program_[rank]) {
        const bool forward = step.action.kind == ActionKind::kSendForward;
        if (!step.waits && (forward || step.action.kind == ActionKind::kSendBackward)) {
          const TransferLink& link = forward ? network_.forward(rank) : network_.backward(rank - 1);
          const double end = link.arrived(step.action.microbatch);
          run.transfers.push_back({static_cast<int>(rank), step.action, end - link.seconds(), end});
        }
      }
      std::ranges::stable_sort(run.transfers.begin() + first, run.transfers.end(), {}, &PipelineSpan::begin_seconds);
    }
  }

  const std::vector<StageTimes>& stages_;
  const PipelineProgram& program_;
  TransferNetwork network_;
  std::vector<std::size_t> next_;  // [rank] its next step, as the others
  std::vector<double> now_;
  std::vector<double> busy_;
  std::vector<double> end_;  // of its last computation
  std::vector<bool> splits_;
  bool with_timeline_;
  std::vector<PipelineSpan> spans_;
};

}  // namespace

const char* toString(PipelineMode mode) { return enumName(kPipelineModes, "mode", mode); }
PipelineMode parsePipelineMode(const std::string& name) { return parseEnum(kPipelineModes, "mode", name); }

PipelineRun simulateTable(const std::vector<StageTimes>& stages, const PipelineTable& table, PipelineMode mode,
                          bool with_timeline) {
  checkStages(stages);
  const int microbatches = checkTable(table);
  if (table.size() != stages.size()) {
    throwInvalid("number of ranks of a table", table.size(), concat(stages.size(), ", the number of stages"));
  }
  const PipelineProgram program = programOf(table, mode);
  PipelineRun run = Simulation(stages, program, microbatches, mode == PipelineMode::kIdeal, with_timeline).run();
  run.most_in_flight = mostInFlight(table);
  return run;
}

}  // namespace torchext::core
