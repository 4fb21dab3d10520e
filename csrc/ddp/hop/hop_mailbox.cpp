#include "ddp/hop/hop_mailbox.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <ATen/record_function.h>
#include <c10/util/StringUtil.h>

#include "c10d/threads/interruptible_wait.h"
#include "ddp/common/elapsed.h"

namespace torchext {

using core::HopMessage;

// ---- From its making to its end ----

HopMailbox::HopMailbox(NotStarted, c10::intrusive_ptr<AttachableBackend> group, HopSetup setup)
    : state_(std::move(group), std::move(setup)) {
  const core::CommunicationGraph& graph = state_.setup.graph;
  for (const std::vector<int>* peers : {&graph.inNeighbours(state_.rank), &graph.outNeighbours(state_.rank)}) {
    for (const int peer : *peers) {
      if (peer != state_.rank) {
        neighbours_.try_emplace(peer, state_, peer);
      }
    }
  }
  const std::lock_guard<std::mutex> lock(state_.mutex);
  beginSession();
}

HopMailbox::HopMailbox(c10::intrusive_ptr<AttachableBackend> group, HopSetup setup)
    : HopMailbox(NotStarted{}, std::move(group), std::move(setup)) {
  failure_callback_ = state_.group->health()->onFailure().add([this] {
    const std::lock_guard<std::mutex> lock(state_.mutex);
    state_.fail(state_.group->health()->failureOf({.name = "training"}));
  });
  for (auto& [peer, neighbour] : neighbours_) {
    neighbour.start();
  }
}

HopMailbox::~HopMailbox() { stop(); }

void HopMailbox::stop() {
  {
    const std::lock_guard<std::mutex> lock(state_.mutex);
    state_.stopping = true;
    state_.fail(state_.group->health()->failureOf({.name = "training"}));
  }
  state_.group->health()->onFailure().remove(failure_callback_);
  for (auto& [peer, neighbour] : neighbours_) {
    neighbour.stop();
  }
}

void HopMailbox::checkUsable() const {
  const std::lock_guard<std::mutex> lock(state_.mutex);
  if (state_.error) {
    std::rethrow_exception(state_.error);
  }
}

HopStats HopMailbox::stats() const {
  const std::lock_guard<std::mutex> lock(state_.mutex);
  HopStats result = state_.stats;
  for (const auto& [peer, owner] : neighbours_) {
    if (owner.tokens() != nullptr) {
      result.tokens[peer] = owner.tokens()->size();
    }
  }
  return result;
}

// ---- Waits ----

template <class Ready, class Missing>
void HopMailbox::waitUntil(std::unique_lock<std::mutex>& lock, const char* range, double& spent_ms, Ready ready,
                           Missing missing) {
  if (!state_.error && !ready()) {
    RECORD_FUNCTION(range, std::vector<c10::IValue>{});
    const auto start = Clock::now();
    const auto timeout = state_.group->timeout();
    const bool in_time =
        waitInterruptibly(state_.changed, lock, start + timeout, [&] { return state_.error || ready(); });
    ++state_.stats.waits;
    spent_ms += millisecondsSince(start);
    if (!in_time) {
      timeOut(lock, c10::str("rank ", state_.rank, " waited ", timeout.count(), " ms for ", missing()));
    }
  }
  if (state_.error) {
    std::rethrow_exception(state_.error);
  }
}

void HopMailbox::timeOut(std::unique_lock<std::mutex>& lock, const std::string& text) {
  lock.unlock();
  state_.group->health()->poison(state_.rank, text);  // its callback sets the error
  lock.lock();
  state_.fail(state_.group->health()->failureOf({.name = "training"}));
}

bool HopMailbox::none(const Which& which) const {
  return std::none_of(neighbours_.begin(), neighbours_.end(), [&](const auto& entry) { return which(entry.second); });
}

std::string HopMailbox::ranks(const Which& which) const {
  std::vector<int> found;
  for (const auto& [peer, neighbour] : neighbours_) {
    if (which(neighbour)) {
      found.push_back(peer);
    }
  }
  return c10::str(found.size() == 1 ? "rank " : "ranks ", c10::Join(", ", found));
}

// ---- An iteration ----

std::byte* HopMailbox::ownBlock(std::int64_t tag) {
  std::unique_lock<std::mutex> lock(state_.mutex);
  waitUntil(
      lock, "torchext::hop::wait_send", state_.stats.send_wait_ms, [&] { return state_.slots.sending(tag) == 0; },
      [&] {
        return c10::str("its model of iteration ", tag - state_.slots.maxAhead() - 1, " to go out to ",
                        ranks([](const HopNeighbour& to) { return to.takesModels(); }));
      });
  return state_.slots.blockOf(state_.rank, tag);
}

void HopMailbox::publish(std::int64_t tag, bool send) {
  const std::lock_guard<std::mutex> lock(state_.mutex);
  core::UpdateQueue& queue = state_.slots.queue();
  if (queue.admit(state_.rank, tag) != core::Admission::kStore) {
    C10_THROW_ERROR(DistBackendError, c10::str("hop: the own model of iteration ", tag, " has no slot"));
  }
  queue.enqueue(state_.rank, tag);
  for (auto& [peer, to] : neighbours_) {
    if (send && to.takesModels()) {
      to.sendModel(tag);
    }
  }
}

std::vector<HopModel::Input> HopMailbox::take() {
  std::unique_lock<std::mutex> lock(state_.mutex);
  core::UpdateQueue& queue = state_.slots.queue();
  HopStats& stats = state_.stats;
  const std::int64_t oldest = state_.iteration - state_.setup.mode.staleness;
  waitUntil(
      lock, "torchext::hop::wait_models", stats.model_wait_ms, [&] { return queue.ready(); },
      [&] {
        return c10::str("the model of iteration ", state_.iteration, " from ",
                        ranks([&](const HopNeighbour& from) { return from.owesModel(oldest); }));
      });
  std::vector<HopModel::Input> inputs;
  for (const core::Update& update : queue.dequeue()) {
    inputs.push_back({state_.slots.block(update.slot), update.weight});
    if (update.sender != state_.rank) {
      ++stats.ages[state_.iteration - update.tag];
    }
  }
  ++stats.group_sizes[static_cast<std::int64_t>(inputs.size())];
  stats.averages += inputs.size() > 1 ? 1 : 0;
  return inputs;
}

void HopMailbox::release() {
  const std::lock_guard<std::mutex> lock(state_.mutex);
  state_.slots.queue().release();
  state_.slots_free.notify_all();
  if (state_.setup.mode.notify_ack) {
    for (auto& [peer, neighbour] : neighbours_) {
      neighbour.acknowledge(state_.iteration);
    }
  }
}

int HopMailbox::lag() const {
  const std::lock_guard<std::mutex> lock(state_.mutex);
  int smallest = std::numeric_limits<int>::max();
  for (const auto& [peer, owner] : neighbours_) {
    if (owner.tokens() != nullptr) {
      smallest = std::min(smallest, owner.tokens()->lag());
    }
  }
  return smallest == std::numeric_limits<int>::max() ? 0 : smallest;
}

void HopMailbox::enter(std::int64_t tag) {
  std::unique_lock<std::mutex> lock(state_.mutex);
  const core::HopMode& mode = state_.setup.mode;
  const std::int64_t before = state_.iteration - 1;
  const int count = static_cast<int>(tag - state_.iteration);
  if (mode.notify_ack) {
    const auto holds_back = [&](const HopNeighbour& to) { return to.owesAcknowledgement(before); };
    waitUntil(
        lock, "torchext::hop::wait_acks", state_.stats.token_wait_ms, [&] { return none(holds_back); },
        [&] { return c10::str("the acknowledgement of iteration ", before, " from ", ranks(holds_back)); });
  }
  if (mode.hasTokens()) {
    const auto holds_back = [&](const HopNeighbour& owner) {
      return owner.tokens() != nullptr && !owner.tokens()->canTake(count);
    };
    waitUntil(
        lock, "torchext::hop::wait_tokens", state_.stats.token_wait_ms, [&] { return none(holds_back); },
        [&] { return c10::str("a token for iteration ", tag, " from ", ranks(holds_back)); });
  }
  for (auto& [peer, owner] : neighbours_) {
    owner.takeTokens(count);
  }
  state_.iteration = tag;
  state_.slots.queue().advance(tag);  // before any token says so: who takes one may send what only now has a slot
  state_.slots_free.notify_all();
  for (const auto& [peer, from] : neighbours_) {
    if (const auto gap = from.gapAt(tag)) {
      ++state_.stats.gaps[*gap];
    }
  }
  if (mode.hasTokens()) {
    for (auto& [peer, consumer] : neighbours_) {
      consumer.giveTokens(tag, count);
    }
  }
}

// ---- Sessions ----

void HopMailbox::beginSession() {
  state_.slots.beginSession();
  state_.iteration = 0;
  state_.draining = false;
  for (auto& [peer, neighbour] : neighbours_) {
    neighbour.beginSession();
  }
}

bool HopMailbox::drain(bool finally, std::optional<std::chrono::milliseconds> limit) {
  RECORD_FUNCTION("torchext::hop::drain", std::vector<c10::IValue>{});
  std::unique_lock<std::mutex> lock(state_.mutex);
  if (!std::exchange(state_.draining, true)) {  // else goes on with what a call with a limit has begun
    state_.progress = Clock::now();
    for (auto& [peer, neighbour] : neighbours_) {
      neighbour.sayFarewell(finally ? HopMessage::kLeave : HopMessage::kPause);
    }
    state_.slots_free.notify_all();
  }
  const auto all_parted = [&] { return none([](const HopNeighbour& peer) { return !peer.parted(); }); };
  const auto deadline = limit ? Clock::now() + *limit : Clock::time_point::max();
  while (!state_.error && !all_parted()) {
    const auto before = state_.progress;
    const auto late = before + state_.group->timeout();
    const auto moved = [&] { return state_.error || all_parted() || state_.progress != before; };
    if (limit ? state_.changed.wait_until(lock, std::min(late, deadline), moved)
              : waitInterruptibly(state_.changed, lock, late, moved)) {
      continue;
    }
    if (Clock::now() < late) {
      return false;
    }
    timeOut(lock, c10::str("rank ", state_.rank, " waited ", state_.group->timeout().count(),
                           " ms in synchronize, averaged or detach for ",
                           ranks([](const HopNeighbour& peer) { return !peer.left(); }), ", which trained no further"));
  }
  if (state_.error) {
    std::rethrow_exception(state_.error);
  }
  if (!finally) {
    ++state_.session;
    beginSession();
  }
  return true;
}

}  // namespace torchext
