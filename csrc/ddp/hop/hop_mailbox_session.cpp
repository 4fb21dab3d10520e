// A mailbox from its making to its end: sessions, draining, stopping. An iteration's functions: hop_mailbox.cpp.
#include <algorithm>
#include <limits>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include "c10d/threads/interruptible_wait.h"
#include "ddp/common/elapsed.h"
#include "ddp/hop/hop_mailbox.h"

namespace torchext {
namespace {

using core::HopMessage;

at::Tensor memoryFor(int models, std::size_t bytes) {
  return at::empty({static_cast<std::int64_t>(models) * static_cast<std::int64_t>(bytes)}, at::kByte);
}

// The bound that every gap seen keeps. Models tell the gap where the next iteration needs one of every neighbour; where
// some may be missing, or while a worker jumps, only the tokens of an out-neighbour.
std::optional<int> assertedGapBound(const core::HopMode& mode, bool gives_tokens, int length_to_peer) {
  if (mode.backup_workers == 0 && !mode.skips()) {
    return core::toldGapBound(mode, gives_tokens, length_to_peer);
  }
  return gives_tokens ? std::optional<int>(mode.max_iteration_gap) : std::nullopt;
}

}  // namespace

HopMailbox::HopMailbox(NotStarted, c10::intrusive_ptr<AttachableBackend> group, HopSetup setup)
    : group_(std::move(group)),
      setup_(std::move(setup)),
      rank_(group_->getRank()),
      max_ahead_(core::largestLead(setup_.mode, setup_.graph)),
      debug_(c10d::debug_level() != c10d::DebugLevel::Off),
      memory_(
          memoryFor((max_ahead_ + 1) * static_cast<int>(setup_.graph.inNeighbours(rank_).size()), setup_.model_bytes)),
      sending_(static_cast<std::size_t>(max_ahead_) + 1, 0) {
  for (const int peer : setup_.graph.inNeighbours(rank_)) {
    if (peer != rank_) {
      neighbours_[peer].sends = true;
    }
  }
  for (const int peer : setup_.graph.outNeighbours(rank_)) {
    if (peer != rank_) {
      neighbours_[peer].receives = true;
    }
  }
  const auto from_here = setup_.graph.pathLengthsFrom(rank_);
  for (auto& [peer, neighbour] : neighbours_) {
    if (neighbour.sends) {
      neighbour.gap_bound = assertedGapBound(setup_.mode, neighbour.receives, from_here[core::index(peer)]);
    }
  }
  stats_.slot_bytes = static_cast<std::int64_t>(memory_.nbytes());
  const std::lock_guard<std::mutex> lock(mutex_);
  beginSession();
}

HopMailbox::HopMailbox(c10::intrusive_ptr<AttachableBackend> group, HopSetup setup)
    : HopMailbox(NotStarted{}, std::move(group), std::move(setup)) {
  abort_callback_ = group_->health()->onFailure().add([this] {
    const std::lock_guard<std::mutex> lock(mutex_);
    fail(group_->health()->failureOf({.name = "training"}));
  });
  for (auto& [peer, neighbour] : neighbours_) {
    neighbour.line = std::make_unique<HopLine>(*group_, static_cast<HopLineOwner&>(*this), peer, setup_.channel);
    neighbour.line->start();
  }
}

HopMailbox::~HopMailbox() { HopMailbox::stop(); }

void HopMailbox::beginSession() {
  queue_ = std::make_unique<core::UpdateQueue>(core::UpdateQueueOptions{.senders = setup_.graph.inNeighbours(rank_),
                                                                        .weights = setup_.graph.inWeights(rank_),
                                                                        .max_ahead = max_ahead_,
                                                                        .backup_workers = setup_.mode.backup_workers,
                                                                        .staleness = setup_.mode.staleness});
  iteration_ = 0;
  draining_ = false;
  for (auto& [peer, neighbour] : neighbours_) {
    neighbour.acked = neighbour.newest = -1;
    neighbour.left = neighbour.farewell_sent = false;
    if (setup_.mode.hasTokens() && neighbour.receives) {
      // The capacity of the paper is that along a path on which nobody has left. It bounds no memory: as large as can
      // be, and the identity is checked instead.
      neighbour.tokens.emplace(setup_.mode.max_iteration_gap,
                               std::numeric_limits<int>::max() / setup_.mode.max_iteration_gap - 1);
    }
    if (neighbour.gone) {
      leftBy(peer, neighbour, true);
    }
  }
}

std::string HopMailbox::ranks(const std::function<bool(const Neighbour&)>& which) const {
  std::vector<int> found;
  for (const auto& [peer, neighbour] : neighbours_) {
    if (which(neighbour)) {
      found.push_back(peer);
    }
  }
  return c10::str(found.size() == 1 ? "rank " : "ranks ", c10::Join(", ", found));
}

bool HopMailbox::drain(bool finally, std::optional<std::chrono::milliseconds> limit) {
  RECORD_FUNCTION("torchext::hop::drain", std::vector<c10::IValue>{});
  std::unique_lock<std::mutex> lock(mutex_);
  if (!std::exchange(draining_, true)) {  // else goes on with what a call with a limit has begun
    progress_ = Clock::now();
    for (auto& [peer, neighbour] : neighbours_) {
      neighbour.farewell = finally ? HopMessage::kLeave : HopMessage::kPause;
      neighbour.to_send.notify_one();
    }
    slots_free_.notify_all();
  }
  const auto here = [](const auto& entry) { return entry.second.left && entry.second.farewell_sent; };
  const auto all_here = [&] { return std::all_of(neighbours_.begin(), neighbours_.end(), here); };
  const auto deadline = limit ? Clock::now() + *limit : Clock::time_point::max();
  while (!error_ && !all_here()) {
    const auto before = progress_;
    const auto late = before + group_->timeout();
    const auto moved = [&] { return error_ || all_here() || progress_ != before; };
    if (limit ? changed_.wait_until(lock, std::min(late, deadline), moved)
              : waitInterruptibly(changed_, lock, late, moved)) {
      continue;
    }
    if (Clock::now() < late) {
      return false;
    }
    const auto text =
        c10::str("rank ", rank_, " waited ", group_->timeout().count(), " ms in synchronize, averaged or detach for ",
                 ranks([](const Neighbour& peer) { return !peer.left; }), ", which trained no further");
    lock.unlock();
    group_->health()->poison(rank_, text);
    lock.lock();
    fail(group_->health()->failureOf({.name = "training"}));
  }
  if (error_) {
    std::rethrow_exception(error_);
  }
  if (!finally) {
    ++session_;
    beginSession();
  }
  return true;
}

void HopMailbox::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    fail(group_->health()->failureOf({.name = "training"}));
  }
  group_->health()->onFailure().remove(abort_callback_);
  for (auto& [peer, neighbour] : neighbours_) {
    if (neighbour.line) {
      neighbour.line->stop();
    }
  }
}

void HopMailbox::checkUsable() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error_) {
    std::rethrow_exception(error_);
  }
}

HopStats HopMailbox::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  HopStats result = stats_;
  for (const auto& [peer, owner] : neighbours_) {
    if (owner.tokens && !owner.tokens->released()) {
      result.tokens[peer] = owner.tokens->size();
    }
  }
  return result;
}

}  // namespace torchext
