#include "ddp/hop/hop_neighbour.h"
#include "c10d/fault/explain_error.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/debug.h>

namespace torchext {

using core::HopMessage;

namespace {

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

// The bound that every gap seen keeps. Models tell the gap where the next iteration needs one of every neighbour; where
// some may be missing, or while a worker jumps, only the tokens of an out-neighbour.
std::optional<int> assertedGapBound(const HopWorkerState& state, int peer) {
  const core::HopMode& mode = state.setup.mode;
  const core::CommunicationGraph& graph = state.setup.graph;
  if (c10d::debug_level() == c10d::DebugLevel::Off || !contains(graph.inNeighbours(state.rank), peer)) {
    return std::nullopt;
  }
  const bool gives_tokens = contains(graph.outNeighbours(state.rank), peer);
  if (mode.backup_workers == 0 && !mode.skips()) {
    return core::toldGapBound(mode, gives_tokens, graph.pathLengthsFrom(state.rank)[core::index(peer)]);
  }
  return gives_tokens ? std::optional<int>(mode.max_iteration_gap) : std::nullopt;
}

}  // namespace

HopNeighbour::HopNeighbour(HopWorkerState& state, int peer)
    : state_(state),
      peer_(peer),
      sends_(contains(state.setup.graph.inNeighbours(state.rank), peer)),
      receives_(contains(state.setup.graph.outNeighbours(state.rank), peer)),
      gap_bound_(assertedGapBound(state, peer)),
      to_send_(state.to_send[peer]),
      line_(*state.group, static_cast<HopLineOwner&>(*this), peer, state.setup.channel) {}

// ---- The training thread ----

void HopNeighbour::beginSession() {
  acked_ = newest_ = -1;
  left_ = farewell_sent_ = false;
  const core::HopMode& mode = state_.setup.mode;
  if (mode.hasTokens() && receives_) {
    // The capacity of the paper is that along a path on which nobody has left. It bounds no memory: as large as can be,
    // and the identity is checked instead.
    tokens_.emplace(mode.max_iteration_gap, std::numeric_limits<int>::max() / mode.max_iteration_gap - 1);
  }
  if (gone_) {
    leave(true);
  }
}

void HopNeighbour::sendModel(std::int64_t tag) {
  models_.push_back(tag);
  ++state_.slots.sending(tag);
  to_send_.notify_one();
}

void HopNeighbour::acknowledge(std::int64_t tag) {
  if (sends_) {
    post(state_.header(HopMessage::kAck, tag));
  }
}

void HopNeighbour::giveTokens(std::int64_t tag, int count) {
  if (sends_) {
    HopMessage message = state_.header(HopMessage::kTokens, tag);
    message.count = count;
    post(message);
  }
}

void HopNeighbour::takeTokens(int count) {
  if (tokens_) {
    tokens_->take(count);
  }
}

void HopNeighbour::post(const HopMessage& message) {
  if (left_) {
    return;
  }
  if (message.kind == HopMessage::kTokens && !urgent_.empty() && urgent_.back().kind == HopMessage::kTokens) {
    urgent_.back().count += message.count;
    urgent_.back().tag = message.tag;
  } else {
    urgent_.push_back(message);
  }
  to_send_.notify_one();
}

void HopNeighbour::sayFarewell(HopMessage::Kind kind) {
  farewell_ = kind;
  to_send_.notify_one();
}

std::optional<std::int64_t> HopNeighbour::gapAt(std::int64_t tag) const {
  if (!sends_ || left_) {
    return std::nullopt;
  }
  const std::int64_t gap = tag - std::max(newest_, tokens() != nullptr ? tag + tokens()->lag() : 0);
  TORCH_INTERNAL_ASSERT(gap <= gap_bound_.value_or(gap), "hop: rank ", state_.rank, " enters iteration ", tag, ", ",
                        gap, " ahead of rank ", peer_, "; at most ", *gap_bound_, " can be with the chosen mode");
  return gap;
}

// ---- The sending thread ----

std::optional<HopLineOwner::Outgoing> HopNeighbour::next() {
  std::unique_lock<std::mutex> lock(state_.mutex);
  while (!state_.ended()) {
    if (!urgent_.empty()) {
      const HopMessage message = urgent_.front();
      urgent_.pop_front();
      return Outgoing{message, nullptr};
    }
    dropPassed();
    // Two that drain take nothing any more, and would wait for each other's acknowledgement.
    const bool acked =
        !state_.setup.mode.notify_ack || state_.draining || (!models_.empty() && acked_ >= models_.front() - 1);
    if (!models_.empty() && acked) {
      const std::int64_t tag = models_.front();
      models_.pop_front();
      return Outgoing{state_.header(HopMessage::kModel, tag), state_.slots.blockOf(state_.rank, tag)};
    }
    if (models_.empty() && farewell_) {
      return Outgoing{state_.header(*std::exchange(farewell_, std::nullopt), state_.iteration), nullptr};
    }
    to_send_.wait(lock);
  }
  return std::nullopt;
}

// Models that the neighbour could only throw away. What its tokens tell is where it stood when it gave them.
void HopNeighbour::dropPassed() {
  if (tokens() == nullptr) {
    return;
  }
  const std::int64_t reached = state_.iteration + tokens()->lag();
  while (!models_.empty() && models_.front() < reached - state_.setup.mode.staleness) {
    --state_.slots.sending(models_.front());
    models_.pop_front();
    ++state_.stats.not_sent;
    state_.changed.notify_all();
  }
}

void HopNeighbour::sent(const HopMessage& header) {
  const std::lock_guard<std::mutex> lock(state_.mutex);
  state_.stats.bytes_sent += static_cast<std::int64_t>(sizeof(header) + header.bytes);
  if (header.kind == HopMessage::kModel) {
    --state_.slots.sending(header.tag);
  } else if (header.kind == HopMessage::kPause || header.kind == HopMessage::kLeave) {
    farewell_sent_ = true;
  }
  state_.changed.notify_all();
}

// ---- The receiving thread ----

void HopNeighbour::checkSession(const HopMessage& header) const {
  if (header.session != state_.session || left_) {
    C10_THROW_ERROR(DistBackendError, c10::str("hop: a message of session ", header.session, " from rank ", peer_,
                                               " in session ", state_.session, left_ ? ", which it has left" : "",
                                               ": all ranks must call synchronize, averaged and detach equally often"));
  }
}

std::byte* HopNeighbour::destination(const HopMessage& header) {
  std::unique_lock<std::mutex> lock(state_.mutex);
  checkSession(header);
  if (!sends_) {
    C10_THROW_ERROR(DistBackendError, c10::str("hop: a model from rank ", peer_, ", which is no in-neighbour"));
  }
  newest_ = std::max(newest_, header.tag);
  const auto too_late = [this] {
    scratch_.resize(state_.setup.model_bytes);
    return scratch_.data();
  };
  HopSlots& slots = state_.slots;
  while (!state_.ended()) {
    if (state_.draining) {
      return too_late();
    }
    if (header.tag <= slots.queue().iteration() + slots.maxAhead()) {
      switch (slots.queue().admit(peer_, header.tag)) {
        case core::Admission::kStore:
          storing_ = true;
          return slots.blockOf(peer_, header.tag);
        case core::Admission::kDrop:
          ++state_.stats.too_late;
          return too_late();
        case core::Admission::kWait:
          break;
      }
    }
    state_.slots_free.wait(lock);
  }
  return nullptr;
}

bool HopNeighbour::received(const HopMessage& header) {
  const std::lock_guard<std::mutex> lock(state_.mutex);
  checkSession(header);
  state_.progress = std::chrono::steady_clock::now();
  state_.changed.notify_all();
  switch (header.kind) {
    case HopMessage::kModel:
      if (std::exchange(storing_, false)) {
        state_.slots.queue().enqueue(peer_, header.tag);
      }
      return true;
    case HopMessage::kTokens:
      receiveTokens(header);
      return true;
    case HopMessage::kAck:
      if (!state_.setup.mode.notify_ack || !receives_ || header.tag <= acked_) {
        C10_THROW_ERROR(DistBackendError, c10::str("hop: rank ", peer_, " acknowledges iteration ", header.tag,
                                                   " after ", acked_, "; nobody asked for it"));
      }
      acked_ = header.tag;
      to_send_.notify_one();
      return true;
    default:
      leave(header.kind == HopMessage::kLeave);
      return !gone_;
  }
}

void HopNeighbour::receiveTokens(const HopMessage& header) {
  if (!tokens_) {
    C10_THROW_ERROR(DistBackendError, c10::str("hop: tokens from rank ", peer_, ", which owns none for this rank"));
  }
  tokens_->give(header.count);
  const std::int64_t expected = state_.setup.mode.max_iteration_gap + header.tag - state_.iteration;
  if (tokens_->size() != expected) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("hop: ", tokens_->size(), " tokens of rank ", peer_, " at its iteration ", header.tag,
                             " and the own ", state_.iteration, ", expected ", expected));
  }
}

// The neighbour has said farewell: nobody waits for it any more, and nothing goes to it.
void HopNeighbour::leave(bool for_good) {
  left_ = true;
  gone_ = gone_ || for_good;
  if (sends_) {
    state_.slots.queue().leave(peer_);
  }
  if (tokens_) {
    tokens_->release();
  }
  for (const std::int64_t tag : models_) {
    --state_.slots.sending(tag);
  }
  models_.clear();
  urgent_.clear();
  to_send_.notify_one();
}

void HopNeighbour::failed(std::exception_ptr error) {
  {
    const std::lock_guard<std::mutex> lock(state_.mutex);
    if (state_.ended()) {
      return;
    }
  }
  // A broken connection becomes the error that names who died, and has poisoned the group.
  const auto health = state_.group->health();
  error = explain(*health, error, OpInfo{.name = "training", .peer = peer_});
  if (!health->failed()) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& what) {
      state_.group->health()->poison(peer_, what.what());
    }
  }
  const std::lock_guard<std::mutex> lock(state_.mutex);
  state_.fail(error);
}

}  // namespace torchext
