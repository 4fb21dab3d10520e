#include "c10d/failure_monitor.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <list>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ops/zeros.h>
#include <c10/util/Logging.h>
#include <c10/util/thread_name.h>

#include "core/wire.h"

namespace torchext {
namespace {

constexpr int kRingTag = FailureMonitor::kReservedTags + 1;
constexpr auto kStopLimit = std::chrono::milliseconds(1000);

// Zeros: Gloo accepts a message that is too short, and what it leaves unwritten must break a rule.
at::Tensor emptyMessage() { return at::zeros({static_cast<int64_t>(core::kVerdictBytes)}, at::kByte); }

}  // namespace

// Shared with the thread, which may outlive the monitor when a handler is stuck.
struct FailureMonitor::State {
  State(c10::intrusive_ptr<c10d::Backend> group, int rank_in, int size_in, Handler on_verdict)
      : control(std::move(group)), rank(rank_in), size(size_in), handler(std::move(on_verdict)) {}

  int successor() const { return (rank + 1) % size; }
  int predecessor() const { return (rank + size - 1) % size; }

  void send(const Verdict& verdict) noexcept;
  void run();
  std::optional<Verdict> receive();
  void deliver(const Verdict& verdict);

  std::mutex mutex;
  std::condition_variable changed;
  c10::intrusive_ptr<c10d::Backend> control;
  const int rank;
  const int size;
  Handler handler;
  bool stopping = false;
  bool announced = false;
  bool successor_left = false;
  bool running = false;
  c10::intrusive_ptr<c10d::Work> pending;
  // Messages under way: Gloo reads their tensors until the peer took them, so they stay until the group goes.
  std::list<std::pair<at::Tensor, c10::intrusive_ptr<c10d::Work>>> sent;
  std::unique_ptr<std::thread> thread;
  std::shared_ptr<State> itself;  // of abandon()
};

void FailureMonitor::State::send(const Verdict& verdict) noexcept {
  try {
    const auto message = core::encodeVerdict(verdict);
    std::vector<at::Tensor> tensors{emptyMessage()};
    std::memcpy(tensors[0].mutable_data_ptr(), message.data(), message.size());
    auto work = control->send(tensors, predecessor(), kRingTag);
    std::lock_guard lock(mutex);
    sent.emplace_back(tensors[0], std::move(work));
  } catch (const std::exception&) {
    // The predecessor is gone; it needs no news, and those behind it have another witness.
  }
}

std::optional<Verdict> FailureMonitor::State::receive() {
  const Verdict closed{Verdict::Kind::kObituary, successor(), rank, "connection closed"};
  std::vector<at::Tensor> tensors{emptyMessage()};
  c10::intrusive_ptr<c10d::Work> work;
  try {
    work = control->recv(tensors, successor(), kRingTag);
  } catch (const std::exception&) {
    return closed;
  }
  {
    std::lock_guard lock(mutex);
    if (stopping) {
      return std::nullopt;
    }
    pending = work;
  }
  bool arrived = false;
  bool failed = false;
  try {
    arrived = work->wait(kForever);
  } catch (const std::exception&) {
    failed = true;
  }
  {
    std::lock_guard lock(mutex);
    pending.reset();
    if (stopping) {
      return std::nullopt;
    }
  }
  if (failed) {
    return closed;
  }
  if (!arrived) {
    return std::nullopt;
  }
  try {
    return core::parseVerdict({static_cast<const std::byte*>(tensors[0].const_data_ptr()), core::kVerdictBytes}, size);
  } catch (const core::MalformedMessage&) {
    return Verdict{Verdict::Kind::kAbort, successor(), rank, "sent a malformed message on the control group"};
  }
}

void FailureMonitor::State::deliver(const Verdict& verdict) {
  Handler call;
  bool first = false;
  {
    std::lock_guard lock(mutex);
    first = !std::exchange(announced, true);
    call = handler;
  }
  // The news goes out before anything here is torn down: a peer that sees our connections close must know why.
  if (first && predecessor() != verdict.origin) {
    send(verdict);
  }
  if (call) {
    call(verdict);
  }
}

void FailureMonitor::State::run() {
  c10::setThreadName("torchext_mon");
  if (auto verdict = receive()) {
    if (verdict->kind == Verdict::Kind::kGoodbye) {
      std::lock_guard lock(mutex);
      successor_left = true;
    } else {
      deliver(*verdict);
    }
  }
  std::lock_guard lock(mutex);
  running = false;
  changed.notify_all();
}

FailureMonitor::FailureMonitor(c10::intrusive_ptr<c10d::Backend> control, int rank, int size, Handler handler)
    : state_(std::make_shared<State>(std::move(control), rank, size, std::move(handler))) {}

FailureMonitor::~FailureMonitor() {
  if (state_) {
    stop(false);
  }
}

void FailureMonitor::start() {
  if (state_->size < 2 || !state_->control) {
    return;
  }
  std::lock_guard lock(state_->mutex);
  state_->running = true;
  state_->thread = std::make_unique<std::thread>([state = state_] { state->run(); });
}

void FailureMonitor::announce(Verdict verdict) noexcept {
  if (state_->size < 2 || !state_->control) {
    return;
  }
  {
    std::lock_guard lock(state_->mutex);
    if (std::exchange(state_->announced, true)) {
      return;
    }
  }
  verdict.origin = state_->rank;
  state_->send(verdict);
}

void FailureMonitor::stop(bool goodbye) noexcept {
  std::unique_ptr<std::thread> thread;
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    state_->handler = nullptr;
    thread = std::move(state_->thread);
    goodbye = goodbye && !std::exchange(state_->announced, true);
  }
  if (state_->size < 2 || !state_->control) {
    return;
  }
  if (goodbye) {
    state_->send({Verdict::Kind::kGoodbye, state_->rank, state_->rank, "left in order"});
  }
  if (!thread) {
    return;
  }
  bool ended = false;
  if (thread->get_id() != std::this_thread::get_id()) {
    std::unique_lock lock(state_->mutex);
    if (state_->pending) {
      state_->pending->abort();
    }
    ended = state_->changed.wait_for(lock, kStopLimit, [this] { return !state_->running; });
  }
  if (ended) {
    thread->join();
  } else {
    // A handler is stuck in someone's callback, or it is the one that destroys us: the thread owns its state and ends
    // by itself.
    thread->detach();
  }
}

void FailureMonitor::releaseGroup() noexcept {
  std::lock_guard lock(state_->mutex);
  if (state_->running) {
    return;  // detached by stop(): the thread lets go of it when it ends
  }
  state_->sent.clear();
  state_->control.reset();
}

void FailureMonitor::abandon() noexcept {
  // Deliberately leaked, as owners of themselves: neither the thread nor the locks mean anything in a forked child.
  State& state = *state_;
  static_cast<void>(state.thread.release());
  state.itself = std::move(state_);
}

bool FailureMonitor::successorLeft() const noexcept {
  std::lock_guard lock(state_->mutex);
  return state_->successor_left;
}

}  // namespace torchext
