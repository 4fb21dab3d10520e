// FailureMonitor: learns within milliseconds that a rank of the group died, within seconds that one fell silent, and
// tells every other rank. Every backend of ours has one; silence is HeartbeatRing's (heartbeat_ring.h).
//
// How
//   On a Gloo group of its own (the control group) rank r keeps one receive posted from its successor (r + 1) % n and a
//   thread blocked on it. When the successor is killed, its TCP connection closes and the receive fails. Rank r then
//   sends PeerDied, detected_by r, to its predecessor, which relays it, until it has gone round the ring: one message a
//   rank. The same ring carries Failure, Abort and Departure (a rank gave up, with its reason) and Leave (orderly: the
//   closing connection that follows is no alarm, and watching ends). Each rank passes on the first fault message only,
//   so every rank has one reason. A connection that closes afterwards is told to this rank alone: a rank that was
//   silent may be dead by then.
//   The ring stays whole without those that have left. Who hears a Leave listens to the next rank instead, and who
//   finds its predecessor gone sends to the one before it. That a rank behind one that left closes its connection is no
//   alarm: as a rule it leaves, too, and has said so to the one that is gone.
//   Heartbeats and queries go the same way (heartbeat_ring.h), and so do headers of collectives, from a rank to its
//   predecessor (call_check.h).
//   Nothing here uses the store: when its server dies, groups that exist go on.
//
// Wire format
//   A fault message is one fixed message of 256 bytes (fault_message.h), and the longest; the others are heartbeat.h
//   and call_header.h. Every field is checked against bounds before use. A malformed message ends the group with the
//   sender named.
//
// Rules of the house
//   The thread never waits with a timeout that can pass: a Gloo wait that times out closes every connection of its
//   group. It waits for kForever, not for "no timeout", because Gloo then takes the timeout that its group connected
//   with, which setTimeout() does not change for point-to-point waits. It is ended by Work::abort() on its pending
//   receive. Tags from kReservedTags upwards on the control group belong to it.
//
// Threads
//   announce() and stop() from any thread; stop() is bounded to about two seconds and must not be called with the
//   interpreter lock held. Events come on threads of the monitor, `fault` at most once and never after stop()
//   returned; the others may still be running then if they were stuck, so they must own what they use.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/fault/heartbeat_ring.h"
#include "core/fault/call_header.h"
#include "core/fault/fault_message.h"

namespace torchext {

using core::FaultMessage;

class FailureMonitor {
 public:
  // First tag on the control group that belongs to the monitor; others use smaller ones.
  static constexpr int kReservedTags = 0x7fff0000;
  // Longer than any job, and far inside the range of every clock.
  static constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);

  struct Events {
    // The first fault message that came from outside.
    std::function<void(const FaultMessage&)> fault;
    // The connection to the successor has closed, also where a fault message came before; not after it has left in
    // order.
    std::function<void(int rank)> lost;
    // The header of a collective that the successor asks about.
    std::function<void(const core::CallMessage&)> call;
    HeartbeatRing::Events heartbeat;
  };

  // control: a connected group of `size` ranks; null for a group of one.
  FailureMonitor(c10::intrusive_ptr<c10d::Backend> control, int rank, int size);
  ~FailureMonitor();
  FailureMonitor(const FailureMonitor&) = delete;
  FailureMonitor& operator=(const FailureMonitor&) = delete;

  // Starts watching, before any other call; nothing to do for a group of one.
  // heartbeat_timeout: after which a silent rank is suspected; 0: never.
  void start(std::chrono::milliseconds heartbeat_timeout, Events events);
  // Sends a fault message of this rank round the ring. Only the first of all fault messages is sent; never throws,
  // never blocks.
  void announce(FaultMessage fault) noexcept;
  // Sends the header to the predecessor; never blocks.
  void post(const core::CallMessage& message) noexcept;
  // Which rank has not called collective `sequence`; nothing when the ring does not answer in time.
  std::optional<core::LaggardQuery> ask(std::uint64_t sequence, std::chrono::milliseconds limit);
  // How far the training of a model has come; see HeartbeatRing. Neither blocks.
  void tell(const core::StepNotice& notice) noexcept;
  std::optional<core::StepNotice> furthest(int model) const;
  // A message of the control group that nobody will wait for any more, whose tensor owns its memory: it stays until the
  // group goes. Gloo takes no receive back, and what comes for one that is gone stops all that comes from that rank:
  // fault messages, too.
  void keep(c10::intrusive_ptr<c10d::Work> work) noexcept;
  // Ends the threads, sending Leave first if asked for. Safe twice.
  void stop(bool leave) noexcept;
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
