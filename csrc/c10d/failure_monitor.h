// FailureMonitor: learns within milliseconds that a rank of the group died, and tells every other rank.
//
// How
//   On a Gloo group of its own (the control group) rank r keeps one receive posted from its successor (r + 1) % n and a
//   thread blocked on it. When the successor is killed, its TCP connection closes and the receive fails: r is the
//   witness. It sends an obituary to its predecessor, which relays it, until it has gone round the ring: one message a
//   rank. The same ring carries ABORT (a rank gave up, with its reason) and GOODBYE (orderly leave: the closing
//   connection that follows is no alarm, and watching ends). Each rank passes on the first verdict only, so every rank
//   has one reason.
//
// Wire format
//   One fixed message of 256 bytes (core/verdict.h). Every field is checked against bounds before use. Its kinds and
//   the sequence field leave room for heartbeats.
//
// Rules of the house
//   The thread never waits with a timeout that can pass: a Gloo wait that times out closes every connection of its
//   group. It waits for kForever, not for "no timeout", because Gloo then takes the timeout that its group connected
//   with, which setTimeout() does not change for point-to-point waits. It is ended by Work::abort() on its pending
//   receive. Tags from kReservedTags upwards on the control group belong to it.
//
// Threads
//   announce() and stop() from any thread; stop() is bounded to about a second and must not be called with the
//   interpreter lock held. The handler runs on the monitor's thread, at most once, and never after stop() returned.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "core/verdict.h"

namespace torchext {

using core::Verdict;

class FailureMonitor {
 public:
  // First tag on the control group that belongs to the monitor; others use smaller ones.
  static constexpr int kReservedTags = 0x7fff0000;
  // Longer than any job, and far inside the range of every clock.
  static constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);

  using Handler = std::function<void(const Verdict&)>;

  // control: a connected group of `size` ranks whose timeout is practically unlimited.
  // handler: called once, with the first verdict that came from outside.
  FailureMonitor(c10::intrusive_ptr<c10d::Backend> control, int rank, int size, Handler handler);
  ~FailureMonitor();
  FailureMonitor(const FailureMonitor&) = delete;
  FailureMonitor& operator=(const FailureMonitor&) = delete;

  // Starts watching; nothing to do for a group of one.
  void start();
  // Sends a verdict of this rank round the ring. Only the first of all verdicts is sent; never throws, never blocks.
  void announce(Verdict verdict) noexcept;
  // Ends the thread, sending GOODBYE first if asked for. Safe twice.
  void stop(bool goodbye) noexcept;
  // After stop(): lets go of the control group, whose connections then close.
  void releaseGroup() noexcept;
  // In a forked child: forgets the thread and the group, which exist only in the parent.
  void abandon() noexcept;
  // True once the successor left in order, from when on nobody is watched here.
  bool successorLeft() const noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace torchext
