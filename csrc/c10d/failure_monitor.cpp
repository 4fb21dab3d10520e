#include "c10d/failure_monitor.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <list>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/util/Logging.h>
#include <c10/util/thread_name.h>

namespace torchext {
namespace {

constexpr uint32_t kMagic = 0x54584d31;  // "TXM1"
constexpr uint16_t kVersion = 1;
constexpr int kRingTag = FailureMonitor::kReservedTags + 1;
constexpr auto kStopLimit = std::chrono::milliseconds(1000);

struct Message {
  uint32_t magic = kMagic;
  uint16_t version = kVersion;
  uint16_t kind = 0;
  int32_t rank = -1;
  int32_t origin = -1;
  uint64_t sequence = 0;
  uint32_t reasonLength = 0;
  char reason[FailureMonitor::kMaxReason] = {};
  char padding[28] = {};
};
static_assert(sizeof(Message) == 256 && std::is_trivially_copyable_v<Message>);

at::Tensor pack(const Verdict& verdict) {
  Message message;
  message.kind = static_cast<uint16_t>(verdict.kind);
  message.rank = verdict.rank;
  message.origin = verdict.origin;
  const auto reason = FailureMonitor::cut(verdict.reason);
  message.reasonLength = static_cast<uint32_t>(reason.size());
  std::memcpy(message.reason, reason.data(), reason.size());
  auto bytes = at::empty({static_cast<int64_t>(sizeof(Message))}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &message, sizeof(message));
  return bytes;
}

// Nothing for a message that breaks any rule.
std::optional<Verdict> unpack(const at::Tensor& bytes, int size) {
  Message message;
  std::memcpy(&message, bytes.const_data_ptr(), sizeof(message));
  const auto isRank = [size](int32_t rank) { return rank >= 0 && rank < size; };
  const bool knownKind = message.kind >= static_cast<uint16_t>(Verdict::Kind::kObituary) &&
                         message.kind <= static_cast<uint16_t>(Verdict::Kind::kAbort);
  if (message.magic != kMagic || message.version != kVersion || !knownKind || !isRank(message.origin) ||
      (message.rank != -1 && !isRank(message.rank)) || message.reasonLength > FailureMonitor::kMaxReason) {
    return std::nullopt;
  }
  Verdict verdict;
  verdict.kind = static_cast<Verdict::Kind>(message.kind);
  verdict.rank = message.rank;
  verdict.origin = message.origin;
  verdict.reason = FailureMonitor::cut(std::string(message.reason, message.reasonLength));
  return verdict;
}

}  // namespace

// Shared with the thread, which may outlive the monitor when a handler is stuck.
struct FailureMonitor::State {
  State(c10::intrusive_ptr<c10d::Backend> group, int rankIn, int sizeIn, Handler onVerdict)
      : control(std::move(group)), rank(rankIn), size(sizeIn), handler(std::move(onVerdict)) {}

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
  bool successorLeft = false;
  bool running = false;
  c10::intrusive_ptr<c10d::Work> pending;
  // Messages under way: Gloo reads their tensors until the peer took them, so they stay until the group goes.
  std::list<std::pair<at::Tensor, c10::intrusive_ptr<c10d::Work>>> sent;
  std::unique_ptr<std::thread> thread;
};

void FailureMonitor::State::send(const Verdict& verdict) noexcept {
  try {
    std::vector<at::Tensor> tensors{pack(verdict)};
    auto work = control->send(tensors, predecessor(), kRingTag);
    std::lock_guard lock(mutex);
    sent.emplace_back(tensors[0], std::move(work));
  } catch (const std::exception&) {
    // The predecessor is gone; it needs no news, and those behind it have another witness.
  }
}

std::optional<Verdict> FailureMonitor::State::receive() {
  const Verdict closed{Verdict::Kind::kObituary, successor(), rank, "connection closed"};
  std::vector<at::Tensor> tensors{at::empty({static_cast<int64_t>(sizeof(Message))}, at::kByte)};
  c10::intrusive_ptr<c10d::Work> work;
  try {
    work = control->recv(tensors, successor(), kRingTag);
  } catch (const std::exception&) {
    return closed;
  }
  {
    std::lock_guard lock(mutex);
    if (stopping) return std::nullopt;
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
    if (stopping) return std::nullopt;
  }
  if (failed) return closed;
  if (!arrived) return std::nullopt;
  auto verdict = unpack(tensors[0], size);
  if (!verdict) {
    return Verdict{Verdict::Kind::kAbort, successor(), rank, "sent a malformed message on the control group"};
  }
  return verdict;
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
  if (first && predecessor() != verdict.origin) send(verdict);
  if (call) call(verdict);
}

void FailureMonitor::State::run() {
  c10::setThreadName("torchext_mon");
  if (auto verdict = receive()) {
    if (verdict->kind == Verdict::Kind::kGoodbye) {
      std::lock_guard lock(mutex);
      successorLeft = true;
    } else {
      deliver(*verdict);
    }
  }
  std::lock_guard lock(mutex);
  running = false;
  changed.notify_all();
}

std::string FailureMonitor::cut(std::string reason) {
  if (reason.size() > kMaxReason) {
    size_t end = kMaxReason;
    while (end > 0 && (static_cast<unsigned char>(reason[end]) & 0xC0) == 0x80) --end;  // inside a UTF-8 character
    reason.resize(end);
  }
  for (char& c : reason) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  return reason;
}

FailureMonitor::FailureMonitor(c10::intrusive_ptr<c10d::Backend> control, int rank, int size, Handler handler)
    : state_(std::make_shared<State>(std::move(control), rank, size, std::move(handler))) {}

FailureMonitor::~FailureMonitor() {
  if (state_) stop(false);
}

void FailureMonitor::start() {
  if (state_->size < 2 || !state_->control) return;
  std::lock_guard lock(state_->mutex);
  state_->running = true;
  state_->thread = std::make_unique<std::thread>([state = state_] { state->run(); });
}

void FailureMonitor::announce(Verdict verdict) noexcept {
  if (state_->size < 2 || !state_->control) return;
  {
    std::lock_guard lock(state_->mutex);
    if (std::exchange(state_->announced, true)) return;
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
  if (state_->size < 2 || !state_->control) return;
  if (goodbye) state_->send({Verdict::Kind::kGoodbye, state_->rank, state_->rank, "left in order"});
  if (!thread) return;
  bool ended = false;
  if (thread->get_id() != std::this_thread::get_id()) {
    std::unique_lock lock(state_->mutex);
    if (state_->pending) state_->pending->abort();
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
  if (state_->running) return;  // detached by stop(): the thread lets go of it when it ends
  state_->sent.clear();
  state_->control.reset();
}

void FailureMonitor::abandon() noexcept {
  // Deliberately leaked: neither the thread nor the locks of this object mean anything in a forked child.
  auto* leaked = new std::shared_ptr<State>(std::move(state_));
  (*leaked)->thread.release();
}

bool FailureMonitor::successorLeft() const noexcept {
  std::lock_guard lock(state_->mutex);
  return state_->successorLeft;
}

}  // namespace torchext
