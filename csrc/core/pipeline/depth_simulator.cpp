#include "core/pipeline/depth_simulator.h"

#include <algorithm>

#include "core/base/check.h"

namespace torchext::core {

double DepthSimulator::seconds(const std::vector<StageTimes>& stages, const std::vector<int>& depths) {
  const std::size_t count = stages.size();
  const std::size_t microbatches = index(microbatches_);
  rows_.assign(count, {});
  arrived_.resize(count * microbatches);
  std::fill_n(arrived_.begin(), microbatches, 0.0);
  for (std::size_t m = 0; m < microbatches; ++m) {
    for (std::size_t j = 0; j < count; ++j) {
      Row& row = rows_[j];
      const std::size_t target = std::min(m + index(depths[j]), microbatches);
      for (; row.forwards < target; ++row.forwards) {
        row.free = std::max(row.free, arrived_[j * microbatches + row.forwards]) + stages[j].forward_seconds;
        if (j + 1 < count) {
          row.sent_forward = std::max(row.free, row.sent_forward) + stages[j].transfer_seconds;
          arrived_[(j + 1) * microbatches + row.forwards] = row.sent_forward;
        }
      }
    }
    for (std::size_t j = count; j-- > 0;) {
      Row& row = rows_[j];
      row.free = std::max(row.free, row.gradient) + stages[j].backward_seconds;
      if (j > 0) {
        row.sent_backward = std::max(row.free, row.sent_backward) + stages[j - 1].transfer_seconds;
        rows_[j - 1].gradient = row.sent_backward;
      }
    }
  }
  double end = 0;
  for (std::size_t j = 0; j < count; ++j) {
    end = std::max(end, rows_[j].free + stages[j].sync_seconds);
  }
  return end;
}

double leastSeconds(const std::vector<StageTimes>& stages, int microbatches, bool split) {
  double before = 0;  // the stage's first forward
  double after = 0;   // its last B; split: its last I, all that the stages before it still do
  double least = 0;
  for (const StageTimes& stage : stages) {
    const double forward = stage.forward_seconds;
    if (split) {
      const double own = stage.backward_weight_seconds + stage.split_sync_seconds;
      const double inputs = microbatches * (forward + stage.backward_input_seconds);
      after = std::max(after, own);
      const double whole = inputs + microbatches * stage.backward_weight_seconds + stage.split_sync_seconds;
      least = std::max({least, before + whole, before + inputs + after});
      after += stage.transfer_seconds + stage.backward_input_seconds;
    } else {
      after = std::max(after, stage.sync_seconds);
      least = std::max(least, before + microbatches * (forward + stage.backward_seconds) + after);
      after += stage.transfer_seconds + stage.backward_seconds;
    }
    before += forward + stage.transfer_seconds;
  }
  return least;
}

}  // namespace torchext::core
