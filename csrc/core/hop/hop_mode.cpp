#include "core/hop/hop_mode.h"

#include <algorithm>

#include "core/base/check.h"

namespace torchext::core {
namespace {

void checkNotNegative(const char* name, int value) {
  if (value < 0) {
    throwInvalid(name, value, "0 or more");
  }
}

}  // namespace

void validateHopMode(const HopMode& mode) {
  checkNotNegative("max_iteration_gap", mode.max_iteration_gap);
  checkNotNegative("backup_workers", mode.backup_workers);
  checkNotNegative("staleness", mode.staleness);
  checkNotNegative("max_jump", mode.max_jump);
  if (mode.notify_ack) {
    const auto alone = [](const char* name, int value) {
      if (value > 0) {
        throwInvalid(name, value, "0 with notify_ack: it bounds the gap by itself and waits for everybody");
      }
    };
    alone("max_iteration_gap", mode.max_iteration_gap);
    alone("backup_workers", mode.backup_workers);
    alone("staleness", mode.staleness);
    alone("max_jump", mode.max_jump);
  }
  if (mode.backup_workers > 0) {
    if (!mode.hasTokens()) {
      throwInvalid("max_iteration_gap", 0,
                   concat("1 or more with backup_workers = ", mode.backup_workers,
                          ": without tokens the gap to a slow worker has no bound"));
    }
    if (mode.staleness > 0) {
      throwInvalid("staleness", mode.staleness,
                   concat("0 with backup_workers = ", mode.backup_workers, ": choose one of the two"));
    }
  }
  if (mode.skips()) {
    if (mode.max_jump < 2) {
      throwInvalid("max_jump", mode.max_jump, "0 (no skipping) or 2 and more: a jump of 1 is a step");
    }
    if (mode.backup_workers == 0 && mode.staleness == 0) {
      throwInvalid("max_jump", mode.max_jump,
                   "0 without backup_workers or staleness: somebody would wait for the skipped iterations");
    }
    if (!mode.hasTokens()) {
      throwInvalid(
          "max_iteration_gap", 0,
          concat("1 or more with max_jump = ", mode.max_jump, ": a worker sees in its tokens that it is late"));
    }
    if (mode.jump_trigger < 1) {
      throwInvalid("jump_trigger", mode.jump_trigger, "1 or more");
    }
  } else if (mode.jump_trigger != 1) {
    throwInvalid("jump_trigger", mode.jump_trigger, "1 (the default) without max_jump, which allows jumps");
  }
}

void validateHopMode(const HopMode& mode, const CommunicationGraph& graph) {
  validateHopMode(mode);
  const int fewest = graph.smallestInDegree();
  if (mode.backup_workers >= fewest) {
    throwInvalid("backup_workers", mode.backup_workers,
                 concat("0..", fewest - 1, ": some rank has ", fewest, " in-neighbours, itself included"));
  }
}

int iterationGapBound(const HopMode& mode, int length_j_to_i, int length_i_to_j) {
  if (mode.notify_ack) {
    return std::min(length_j_to_i, 2 * length_i_to_j);
  }
  const int by_tokens = mode.max_iteration_gap * length_i_to_j;
  if (mode.backup_workers > 0) {
    return by_tokens;
  }
  const int by_models = (mode.staleness + 1) * length_j_to_i;
  return mode.hasTokens() ? std::min(by_models, by_tokens) : by_models;
}

int toldGapBound(const HopMode& mode, bool gives_tokens, int length_to_peer) {
  const bool by_models_alone = mode.staleness > 0 && mode.backup_workers == 0 && !gives_tokens;
  return by_models_alone ? mode.staleness + 1 : iterationGapBound(mode, 1, length_to_peer);
}

int largestLead(const HopMode& mode, const CommunicationGraph& graph) {
  int lead = 0;
  for (int receiver = 0; receiver < graph.size(); ++receiver) {
    const auto from_receiver = graph.pathLengthsFrom(receiver);
    for (const int sender : graph.inNeighbours(receiver)) {
      const int length_sender_to_receiver = sender == receiver ? 0 : 1;
      lead = std::max(lead, iterationGapBound(mode, from_receiver[index(sender)], length_sender_to_receiver));
    }
  }
  return lead;
}

int plannedJump(const HopMode& mode, int lag) {
  return mode.skips() && lag > mode.jump_trigger ? std::min(mode.max_jump, lag) : 1;
}

}  // namespace torchext::core
