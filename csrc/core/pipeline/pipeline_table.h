// pipeline_table holds what each rank of a pipeline does in one training step, in order.
//
// Stage j runs on row j of the table, for each of M micro-batches: F (forward), then B (the whole backward), or I
// (gradients of inputs) and later W (gradients of weights). The names are torch's: "2F0" is stage 2's forward of
// micro-batch 0. A row holds computations only; pipeline_lowering adds what is sent and received.
#pragma once

#include <string>
#include <vector>

namespace torchext::core {

enum class ActionKind {
  kForward,
  kBackward,
  kBackwardInput,
  kBackwardWeight,
  kSendForward,     // of an output to the next stage
  kReceiveForward,  // posted: the rank goes on at once
  kSendBackward,    // of an input's gradient to the stage before
  kReceiveBackward,
};
// F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B.
const char* toString(ActionKind kind);
// std::invalid_argument on another name.
ActionKind parseActionKind(const std::string& name);

struct PipelineAction {
  ActionKind kind = ActionKind::kForward;
  int stage = 0;
  int microbatch = 0;
  friend bool operator==(const PipelineAction&, const PipelineAction&) = default;
};
// "2F0", "1RECV_B3".
std::string toString(const PipelineAction& action);

// [rank] its actions, in order.
using PipelineTable = std::vector<std::vector<PipelineAction>>;

// Which tables a plan may have.
enum class OrderFamily {
  k1F1B,        // d forwards, then backward and forward in turns, then backwards; d by stage
  kGPipe,       // all forwards, then all backwards
  kZeroBubble,  // I and W instead of B
};
// "1f1b", "gpipe", "zero-bubble".
const char* toString(OrderFamily family);
OrderFamily parseOrderFamily(const std::string& name);

// The micro-batches of a table: each row has every F once, and after it B, or I and then W.
// std::invalid_argument naming rank and action otherwise, and on no rank or no action.
int checkTable(const PipelineTable& table);

// [stage] the most micro-batches whose F is done and whose B or W is not.
std::vector<int> mostInFlight(const PipelineTable& table);

}  // namespace torchext::core
