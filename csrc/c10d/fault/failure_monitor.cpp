#include "c10d/fault/failure_monitor.h"

#include <chrono>
#include <cstring>
#include <list>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include "c10d/fault/fault_points.h"
#include "c10d/threads/bounded_thread.h"
#include "core/base/wire.h"

namespace torchext {
namespace {

constexpr int kRingTag = FailureMonitor::kReservedTags + 1;
constexpr auto kWatchStopLimit = std::chrono::milliseconds(1000);
// For the Leave message to be out before the connections close. It has, as a rule, when send() returns: the predecessor
// has a receive posted. Not when it is still at the message before, on a busy machine.
constexpr auto kLeaveLimit = std::chrono::milliseconds(100);

// Zeros: Gloo accepts a message that is too short, and what it leaves unwritten must break a rule.
at::Tensor emptyMessage() { return at::zeros({static_cast<int64_t>(core::kFaultMessageBytes)}, at::kByte); }

}  // namespace

// Shared with the thread, which may outlive the monitor when a handler is stuck.
struct FailureMonitor::State {
  State(c10::intrusive_ptr<c10d::Backend> group, int rank_in, int size_in)
      : control(std::move(group)), rank(rank_in), size(size_in), successor((rank_in + 1) % size_in) {}

  c10::intrusive_ptr<c10d::Work> send(const FaultMessage& fault) noexcept;
  c10::intrusive_ptr<c10d::Work> sendTo(int peer, const FaultMessage& fault);
  void sendLeave() noexcept;
  void resend() noexcept;
  void run();
  std::optional<at::Tensor> receive();
  std::optional<FaultMessage> read(const at::Tensor& message);
  void deliver(const FaultMessage& fault);
  bool follow();

  std::mutex mutex;
  c10::intrusive_ptr<c10d::Backend> control;
  const int rank;
  const int size;
  int successor;  // the thread's: whom it listens to
  Events events;
  std::optional<FaultMessage> sent;          // the one that this rank has sent
  std::shared_ptr<HeartbeatRing> heartbeat;  // set once, by start(); null in a group of one
  bool stopping = false;
  bool announced = false;
  bool successor_left = false;
  bool thread_still_runs = false;  // stop() could not wait for the thread
  c10::intrusive_ptr<c10d::Work> pending;
  // Messages under way, with their tensors: Gloo needs them until the peer's side of them is there, which may be never.
  std::list<c10::intrusive_ptr<c10d::Work>> kept;
  BoundedThread thread;
  std::shared_ptr<State> itself;  // of abandon()
};

// The message under way; null when nobody before this rank takes it, up to the one that has detected the fault.
c10::intrusive_ptr<c10d::Work> FailureMonitor::State::send(const FaultMessage& fault) noexcept {
  int peer = heartbeat->predecessor();
  while (peer != rank && peer != fault.detected_by) {
    try {
      return sendTo(peer, fault);
    } catch (const std::exception&) {
      peer = heartbeat->pass(peer);
    }
  }
  return nullptr;
}

// Null when the connections are closed. Throws when the peer is gone.
c10::intrusive_ptr<c10d::Work> FailureMonitor::State::sendTo(int peer, const FaultMessage& fault) {
  c10::intrusive_ptr<c10d::Backend> group;
  {
    std::lock_guard lock(mutex);
    group = control;
  }
  if (!group) {
    return nullptr;
  }
  const auto message = core::encodeFaultMessage(fault);
  std::vector<at::Tensor> tensors{emptyMessage()};
  std::memcpy(tensors[0].mutable_data_ptr(), message.data(), message.size());
  auto work = group->send(tensors, peer, kRingTag);
  std::lock_guard lock(mutex);
  kept.push_back(work);
  return work;
}

// The predecessor was gone, and may have been when the fault message went to it.
void FailureMonitor::State::resend() noexcept {
  std::optional<FaultMessage> fault;
  {
    std::lock_guard lock(mutex);
    fault = sent;
  }
  if (fault) {
    send(*fault);
  }
}

void FailureMonitor::State::sendLeave() noexcept {
  const auto work = send({FaultMessage::Kind::kLeave, rank, rank, "left in order"});
  try {
    if (work) {
      work->wait(kLeaveLimit);
    }
  } catch (const std::exception&) {
    // The predecessor leaves as well, and receives nothing any more.
  }
}

// The successor's next message; nothing when stop() ended the wait. Throws when the connection is closed.
std::optional<at::Tensor> FailureMonitor::State::receive() {
  std::vector<at::Tensor> tensors{emptyMessage()};
  auto work = control->recv(tensors, successor, kRingTag);
  {
    std::lock_guard lock(mutex);
    if (stopping) {
      return std::nullopt;
    }
    pending = work;
  }
  const bool arrived = work->wait(kForever);
  std::lock_guard lock(mutex);
  pending.reset();
  return arrived && !stopping ? std::optional<at::Tensor>(tensors[0]) : std::nullopt;
}

// A fault message, or nothing when the message was of another kind and has been dealt with.
std::optional<FaultMessage> FailureMonitor::State::read(const at::Tensor& message) {
  const std::span bytes(static_cast<const std::byte*>(message.const_data_ptr()), core::kFaultMessageBytes);
  if (heartbeat->take(bytes, successor)) {
    return std::nullopt;
  }
  if (core::magicOf(bytes) != core::CallMessage::kMagic) {
    return core::parseFaultMessage(bytes, size);
  }
  const auto header = core::parseCallMessage(bytes, successor);
  std::function<void(const core::CallMessage&)> call;
  {
    std::lock_guard lock(mutex);
    call = events.call;
  }
  if (call) {
    call(header);
  }
  return std::nullopt;
}

void FailureMonitor::State::deliver(const FaultMessage& fault) {
  std::function<void(const FaultMessage&)> call;
  bool first = false;
  {
    std::lock_guard lock(mutex);
    first = !std::exchange(announced, true);
    call = events.fault;
    if (first) {
      sent = fault;
    }
  }
  // The news goes out before anything here is torn down: a peer that sees our connections close must know why.
  if (first) {
    send(fault);
  }
  if (call) {
    call(fault);
  }
}

// Listens to the next rank. Whether there is one.
bool FailureMonitor::State::follow() {
  successor = (successor + 1) % size;
  return successor != rank;
}

void FailureMonitor::State::run() {
  bool over = false;  // by a fault message. What still comes is received all the same: Gloo's loop would spin on it
  while (true) {
    std::optional<FaultMessage> fault;
    bool closed = false;
    try {
      const auto message = receive();
      if (!message) {
        return;
      }
      fault = read(*message);
    } catch (const core::MalformedMessage& error) {
      fault = FaultMessage{FaultMessage::Kind::kFailure, successor, rank,
                           c10::str("rank ", successor, " sent a malformed message: ", error.what())};
    } catch (const std::exception&) {
      closed = true;
      fault = FaultMessage{FaultMessage::Kind::kPeerDied, successor, rank, "connection closed"};
    }
    std::unique_lock lock(mutex);
    if (closed) {
      pending.reset();
    }
    if (stopping) {
      return;
    }
    const bool left = fault && fault->kind == FaultMessage::Kind::kLeave;
    if (left || (closed && successor_left)) {
      successor_left = true;
      lock.unlock();
      heartbeat->unwatch();
      if (!follow()) {
        return;
      }
      continue;
    }
    const auto lost = closed ? events.lost : nullptr;
    lock.unlock();
    if (lost) {
      lost(successor);
    }
    if (fault && !std::exchange(over, true)) {
      heartbeat->unwatch();
      faultPoint(FaultPoint::kFaultMessageHeard);
      deliver(*fault);
    }
    if (closed) {
      return;
    }
  }
}

FailureMonitor::FailureMonitor(c10::intrusive_ptr<c10d::Backend> control, int rank, int size)
    : state_(std::make_shared<State>(std::move(control), rank, size)) {}

FailureMonitor::~FailureMonitor() {
  if (state_) {
    stop(false);
  }
}

void FailureMonitor::start(std::chrono::milliseconds heartbeat_timeout, Events events) {
  if (!state_->control) {
    return;
  }
  events.heartbeat.moved = [state = std::weak_ptr(state_)] {
    if (const auto alive = state.lock()) {
      alive->resend();
    }
  };
  std::lock_guard lock(state_->mutex);
  state_->heartbeat =
      std::make_shared<HeartbeatRing>(state_->control, kRingTag, heartbeat_timeout, std::move(events.heartbeat));
  state_->events = std::move(events);
  state_->thread = BoundedThread("torchext_mon", [state = state_] { state->run(); });
  state_->heartbeat->start();
}

void FailureMonitor::post(const core::CallMessage& message) noexcept {
  if (state_->heartbeat) {
    state_->heartbeat->post(message);
  }
}

std::optional<core::LaggardQuery> FailureMonitor::ask(std::uint64_t sequence, std::chrono::milliseconds limit) {
  return state_->heartbeat ? state_->heartbeat->ask(sequence, limit) : std::nullopt;
}

void FailureMonitor::tell(const core::StepNotice& notice) noexcept {
  if (state_->heartbeat) {
    state_->heartbeat->tell(notice);
  }
}

std::optional<core::StepNotice> FailureMonitor::furthest(int model) const {
  return state_->heartbeat ? state_->heartbeat->furthest(model) : std::nullopt;
}

void FailureMonitor::announce(FaultMessage fault) noexcept {
  if (!state_->heartbeat) {
    return;
  }
  {
    std::lock_guard lock(state_->mutex);
    if (std::exchange(state_->announced, true)) {
      return;
    }
  }
  fault.detected_by = state_->rank;
  {
    std::lock_guard lock(state_->mutex);
    state_->sent = fault;
  }
  state_->send(fault);
}

void FailureMonitor::keep(c10::intrusive_ptr<c10d::Work> work) noexcept {
  std::lock_guard lock(state_->mutex);
  if (state_->control) {
    state_->kept.push_back(std::move(work));
  }
}

void FailureMonitor::stop(bool leave) noexcept {
  BoundedThread thread;
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    state_->events = {};
    thread = std::move(state_->thread);
    leave = leave && !std::exchange(state_->announced, true);
  }
  if (!state_->heartbeat) {
    return;
  }
  state_->heartbeat->stop();
  if (leave && state_->control) {
    state_->sendLeave();
  }
  {
    std::lock_guard lock(state_->mutex);
    if (state_->pending) {
      state_->pending->abort();
    }
  }
  // If not: a handler is stuck in someone's callback, or it is the one that destroys us. The thread owns its state and
  // ends by itself.
  if (!thread.finish(kWatchStopLimit)) {
    std::lock_guard lock(state_->mutex);
    state_->thread_still_runs = true;
  }
}

void FailureMonitor::releaseGroup() noexcept {
  c10::intrusive_ptr<c10d::Backend> control;  // these end without the lock: Gloo's group joins its threads
  std::list<c10::intrusive_ptr<c10d::Work>> kept;
  std::lock_guard lock(state_->mutex);
  if (state_->thread_still_runs || !state_->heartbeat) {
    return;  // the thread lets go of it when it ends
  }
  kept.swap(state_->kept);
  state_->heartbeat->releaseGroup();
  control.swap(state_->control);
}

void FailureMonitor::abandon() noexcept {
  // Deliberately leaked, as owners of themselves: neither the threads nor the locks mean anything in a forked child.
  State& state = *state_;
  state.thread.abandon();
  if (state.heartbeat) {
    state.heartbeat->abandon();
  }
  state.itself = std::move(state_);
}

bool FailureMonitor::successorLeft() const noexcept {
  std::lock_guard lock(state_->mutex);
  return state_->successor_left;
}

}  // namespace torchext
