#include "c10d/fault/heartbeat_ring.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include <ATen/ops/empty.h>

#include "c10d/fault/failure_monitor.h"
#include "c10d/threads/bounded_thread.h"

namespace torchext {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr auto kRingStopLimit = milliseconds(500);

// Ten beats in the time of suspicion, so that a lost second is no alarm; without heartbeats just the clock's pace.
milliseconds intervalOf(milliseconds timeout) {
  return timeout.count() > 0 ? std::clamp(timeout / 10, milliseconds(10), milliseconds(1000)) : milliseconds(500);
}

}  // namespace

// Shared with the threads, which may outlive the ring when a handler is stuck.
struct HeartbeatRing::State {
  State(c10::intrusive_ptr<c10d::Backend> group, int tag_in, milliseconds timeout, Events events_in)
      : control(std::move(group)),
        tag(tag_in),
        rank(control->getRank()),
        size(control->getSize()),
        predecessor((rank + size - 1) % size),
        beats(timeout.count() > 0),
        interval(intervalOf(timeout)),
        events(std::move(events_in)),
        watch(timeout, interval) {}

  void sendLoop();
  void clockLoop();
  bool sendOne(const std::vector<std::byte>& message);
  bool sendTo(int peer, const std::vector<std::byte>& message);
  int pass(int gone);
  bool note(const core::StepNotice& notice);

  std::mutex mutex;  // guards what is not const
  std::condition_variable changed;
  c10::intrusive_ptr<c10d::Backend> control;
  const int tag;
  const int rank;
  const int size;
  int predecessor;
  const bool beats;
  const milliseconds interval;
  const Events events;
  bool stopping = false;
  // Towards the predecessor.
  std::deque<std::vector<std::byte>> outbox;
  bool beat_waits = false;  // the last heartbeat is still in the outbox: no use in a second one
  // The message under way. Gloo reads it until the peer took it, so it stays when the wait is ended.
  c10::intrusive_ptr<c10d::Work> sending;
  // From the successor.
  core::SilenceWatch watch;
  bool watched = true;
  core::Progress last;
  std::map<std::uint64_t, std::optional<core::LaggardQuery>> answers;  // by sequence, of those that are asked for
  std::map<int, core::StepNotice> furthest;                            // by model

  BoundedThread sender;
  BoundedThread clock;
  std::shared_ptr<State> itself;  // of abandon()
};

// Who comes before this rank, and is not `gone`; this rank itself when nobody is left.
int HeartbeatRing::State::pass(int gone) {
  const std::lock_guard lock(mutex);
  if (predecessor == gone) {
    predecessor = (gone + size - 1) % size;
  }
  return predecessor;
}

// Whether the sender goes on: it ends with the ring, or when nobody is left.
bool HeartbeatRing::State::sendOne(const std::vector<std::byte>& message) {
  int peer = pass(-1);
  while (peer != rank) {
    try {
      return sendTo(peer, message);
    } catch (const std::exception&) {
      peer = pass(peer);
      if (events.moved) {
        events.moved();
      }
    }
  }
  return false;
}

// False when the ring is to end. Throws when the peer is gone.
bool HeartbeatRing::State::sendTo(int peer, const std::vector<std::byte>& message) {
  c10::intrusive_ptr<c10d::Backend> group;
  {
    std::lock_guard lock(mutex);
    group = control;
    if (stopping || !group) {
      return false;
    }
  }
  std::vector<at::Tensor> tensors{at::empty({static_cast<std::int64_t>(message.size())}, at::kByte)};
  std::memcpy(tensors[0].mutable_data_ptr(), message.data(), message.size());
  auto work = group->send(tensors, peer, tag);
  {
    std::lock_guard lock(mutex);
    sending = work;
    if (stopping) {
      return false;
    }
  }
  work->wait(FailureMonitor::kForever);
  std::lock_guard lock(mutex);
  if (stopping) {
    return false;
  }
  sending.reset();
  return true;
}

void HeartbeatRing::State::sendLoop() {
  while (true) {
    std::vector<std::byte> message;
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [this] { return stopping || !outbox.empty(); });
      if (stopping) {
        return;
      }
      message = std::move(outbox.front());
      outbox.pop_front();
      beat_waits = beat_waits && core::magicOf(message) != core::Heartbeat::kMagic;
    }
    if (!sendOne(message)) {
      return;
    }
  }
}

void HeartbeatRing::State::clockLoop() {
  bool told = false;
  std::unique_lock lock(mutex);
  while (!stopping) {
    if (beats && !beat_waits) {
      lock.unlock();  // what answers has locks of its own
      const core::Heartbeat beat{.sender = rank, .progress = events.progress()};
      lock.lock();
      const auto bytes = std::as_bytes(std::span(&beat, 1));
      outbox.emplace_back(bytes.begin(), bytes.end());
      beat_waits = true;
      changed.notify_all();
    }
    const auto silence = watch.tick(Clock::now());
    const core::Progress seen = last;
    const bool alarm = beats && watched && silence && !told;
    told = told || alarm;
    lock.unlock();
    if (alarm) {
      events.silent(*silence, seen);
    }
    events.tick();
    lock.lock();
    changed.wait_for(lock, interval, [this] { return stopping; });
  }
}

// With the mutex held: whether it is news.
bool HeartbeatRing::State::note(const core::StepNotice& notice) {
  const auto [known, is_new] = furthest.emplace(notice.model, notice);
  if (!is_new && !notice.isAheadOf(known->second)) {
    return false;
  }
  known->second = notice;
  return true;
}

HeartbeatRing::HeartbeatRing(c10::intrusive_ptr<c10d::Backend> control, int tag, milliseconds timeout, Events events)
    : state_(std::make_shared<State>(std::move(control), tag, timeout, std::move(events))) {}

HeartbeatRing::~HeartbeatRing() {
  if (state_) {
    stop();
  }
}

void HeartbeatRing::start() {
  std::lock_guard lock(state_->mutex);
  state_->sender = BoundedThread("torchext_send", [state = state_] { state->sendLoop(); });
  state_->clock = BoundedThread("torchext_clock", [state = state_] { state->clockLoop(); });
}

int HeartbeatRing::predecessor() const noexcept { return state_->pass(-1); }

int HeartbeatRing::pass(int gone) noexcept { return state_->pass(gone); }

bool HeartbeatRing::take(std::span<const std::byte> bytes, int successor) {
  const auto magic = core::magicOf(bytes);
  if (magic == core::StepNotice::kMagic) {
    const auto notice = core::parseStepNotice(bytes, state_->size);
    std::unique_lock lock(state_->mutex);
    const bool news = state_->note(notice);
    lock.unlock();
    if (news && notice.origin != predecessor()) {
      post(notice);
    }
    return true;
  }
  std::optional<core::LaggardQuery> relay;
  {
    std::lock_guard lock(state_->mutex);
    if (magic == core::Heartbeat::kMagic) {
      state_->last = core::parseHeartbeat(bytes, successor).progress;
      state_->watch.heard();  // the first one, and no other message, begins the watch
      return true;
    }
    if (magic != core::LaggardQuery::kMagic) {
      return false;
    }
    const auto query = core::parseLaggardQuery(bytes, state_->size);
    if (query.origin != state_->rank) {
      relay = query;
    } else if (const auto asked = state_->answers.find(query.sequence); asked != state_->answers.end()) {
      asked->second = query;
      state_->changed.notify_all();
    }
  }
  if (relay) {
    relay->ask(state_->rank, state_->events.progress());
    post(*relay);
  }
  return true;
}

void HeartbeatRing::unwatch() noexcept {
  std::lock_guard lock(state_->mutex);
  state_->watched = false;
}

void HeartbeatRing::post(std::vector<std::byte> message) noexcept {
  std::lock_guard lock(state_->mutex);
  if (state_->stopping) {
    return;
  }
  state_->outbox.push_back(std::move(message));
  state_->changed.notify_all();
}

std::optional<core::LaggardQuery> HeartbeatRing::ask(std::uint64_t sequence, milliseconds limit) {
  core::LaggardQuery query;
  query.origin = state_->rank;
  query.sequence = sequence;
  {
    std::lock_guard lock(state_->mutex);
    state_->answers.insert_or_assign(sequence, std::nullopt);  // an older answer may be true no more
  }
  post(query);
  std::unique_lock lock(state_->mutex);
  const auto answer = [&]() -> std::optional<core::LaggardQuery>& { return state_->answers[sequence]; };
  state_->changed.wait_for(lock, limit, [&] { return state_->stopping || answer().has_value(); });
  return answer();  // kept: others may ask for the same, and few collectives ever time out
}

void HeartbeatRing::tell(core::StepNotice notice) noexcept {
  notice.origin = state_->rank;
  std::unique_lock lock(state_->mutex);
  const bool news = state_->note(notice);
  lock.unlock();
  if (news) {
    post(notice);
  }
}

std::optional<core::StepNotice> HeartbeatRing::furthest(int model) const {
  std::lock_guard lock(state_->mutex);
  const auto known = state_->furthest.find(model);
  return known == state_->furthest.end() ? std::nullopt : std::optional(known->second);
}

void HeartbeatRing::stop() noexcept {
  BoundedThread sender;
  BoundedThread clock;
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    if (state_->sending) {
      state_->sending->abort();
    }
    sender = std::move(state_->sender);
    clock = std::move(state_->clock);
    state_->changed.notify_all();
  }
  sender.finish(kRingStopLimit);
  clock.finish(kRingStopLimit);
}

void HeartbeatRing::releaseGroup() noexcept {
  std::lock_guard lock(state_->mutex);
  state_->sending.reset();
  state_->control.reset();
}

void HeartbeatRing::abandon() noexcept {
  // Deliberately leaked, as the owner of itself: neither the threads nor the locks mean anything in a forked child.
  State& state = *state_;
  state.sender.abandon();
  state.clock.abandon();
  state.itself = std::move(state_);
}

}  // namespace torchext
