// HeartbeatRing: tells the predecessor that this rank lives and where it is, and notices when the successor falls
// silent.
//
// What it adds to FailureMonitor
//   A closed connection shows that a process died. A process that is stopped, or whose host or link is gone, closes
//   nothing. So every rank sends a heartbeat to its predecessor, ten in the time after which silence is suspect. The
//   predecessor of a silent rank names it and says where it was; the fault message then goes round as every other.
//   A rank that lives and is stuck in the user's code goes on beating: it is no failure. When a collective has waited
//   for as long as a silent rank is given, or times out, ask() sends a query once round the ring, which brings back who
//   has not called it: for the log, or for the error. tell() lets every rank know how far the training of a model has
//   come where it waits for others; who has heard of a further one passes on nothing.
//   A predecessor that is gone takes nothing any more. Then what it did not take goes to the one before it.
//
// Threads
//   One sends, and may block for as long as the predecessor takes nothing. One is the clock, and blocks on nothing but
//   its time and Events::tick, which may ask(), briefly: it makes heartbeats, and watches the silence. Receiving is
//   FailureMonitor's: take() runs on its thread. post(), ask(), tell() and furthest() from any thread. The interpreter
//   lock is never needed: a rank that holds it for minutes still beats.
//
// What it costs: a message of 32 bytes every half second, two threads.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "core/fault/heartbeat.h"

namespace torchext {

class HeartbeatRing {
 public:
  struct Events {
    // Where this rank is.
    std::function<core::Progress()> progress;
    // The successor has been silent for so long; `last` is where it last said to be. At most once, on the clock.
    std::function<void(std::chrono::duration<double> silence, const core::Progress& last)> silent;
    // A few times a second, on the clock.
    std::function<void()> tick;
    // The predecessor was found gone, on the thread that sends: from now on it is predecessor().
    std::function<void()> moved;
  };

  // control: as FailureMonitor's. tag: of all messages. timeout: silence that is suspect; 0: no heartbeats are sent,
  // and nobody is suspected. The same on all ranks.
  HeartbeatRing(c10::intrusive_ptr<c10d::Backend> control, int tag, std::chrono::milliseconds timeout, Events events);
  ~HeartbeatRing();
  HeartbeatRing(const HeartbeatRing&) = delete;
  HeartbeatRing& operator=(const HeartbeatRing&) = delete;

  void start();
  // What the successor sent. True if it was a message of this class; core::MalformedMessage for what breaks a rule.
  bool take(std::span<const std::byte> bytes, int successor);
  // Where messages go; this rank itself when nobody is left.
  int predecessor() const noexcept;
  // That rank takes nothing any more. Returns the predecessor from now on.
  int pass(int gone) noexcept;
  // The successor left, or its end is known: it is not watched any more.
  void unwatch() noexcept;
  // Sends a message to the predecessor, after those before. Never blocks.
  void post(std::vector<std::byte> message) noexcept;
  template <typename Message>
  void post(const Message& message) noexcept {
    const auto bytes = std::as_bytes(std::span(&message, 1));
    post(std::vector<std::byte>(bytes.begin(), bytes.end()));
  }
  // Who has not called collective `sequence`. Nothing when the answer does not come in time: some rank is dead or
  // stopped.
  std::optional<core::LaggardQuery> ask(std::uint64_t sequence, std::chrono::milliseconds limit);

  // notice.origin is filled in. Never blocks.
  void tell(core::StepNotice notice) noexcept;
  // The furthest of this model that any rank has told; nothing if none has.
  std::optional<core::StepNotice> furthest(int model) const;

  // Ends both threads; at most about a second; safe twice.
  void stop() noexcept;
  // After stop(): lets go of the control group.
  void releaseGroup() noexcept;
  // In a forked child.
  void abandon() noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace torchext
