#include "core/pipeline/pipeline_lowering.h"

#include <cstddef>
#include <stdexcept>
#include <utility>

#include "core/base/check.h"

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

}  // namespace

PipelineTable lowerTable(const PipelineTable& table) { return Lowering(table, checkTable(table)).lowered(); }

}  // namespace torchext::core
