// Heartbeats: how far a rank is, who is behind or ahead, and from when on silence means something. Who sends what to
// whom, and the threads: c10d/fault/heartbeat_ring.h.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace torchext::core {

// Where a rank is in the collectives of its group.
struct Progress {
  std::uint64_t started = 0;    // the number of the last collective that was called; 0: none yet
  std::uint64_t completed = 0;  // how many of them are done, in whatever order
  std::uint32_t idle_ms = 0;    // since that last call
  std::uint32_t kind = 0;       // of that last call, c10d::OpType
};

// "I live, and am here." From every rank to its predecessor on the ring.
struct Heartbeat {
  static constexpr std::uint32_t kMagic = 0x54584842;  // "TXHB"

  std::uint32_t magic = kMagic;
  std::int32_t sender = -1;
  Progress progress;
};
static_assert(sizeof(Heartbeat) == 32, "the message is a wire format");

// "Who has not called collective number `sequence`?" Goes once round the ring and comes back to `origin` with the
// rank that is furthest behind.
struct LaggardQuery {
  static constexpr std::uint32_t kMagic = 0x54584851;  // "TXHQ"

  std::uint32_t magic = kMagic;
  std::int32_t origin = -1;
  std::uint64_t sequence = 0;
  std::int32_t laggard = -1;  // -1: all that were asked have called it
  std::int32_t reserved = 0;
  Progress progress;  // of the laggard

  // The answer of one more rank.
  void ask(int rank, const Progress& its) {
    if (its.started < sequence && (laggard < 0 || its.started < progress.started)) {
      laggard = rank;
      progress = its;
    }
  }
};
static_assert(sizeof(LaggardQuery) == 48, "the message is a wire format");

// "The training of a model waits here, after so many steps, for others in an average." Goes once round the ring.
struct StepNotice {
  static constexpr std::uint32_t kMagic = 0x54584853;  // "TXHS"

  std::uint32_t magic = kMagic;
  std::int32_t origin = -1;
  std::int32_t model = 0;     // of those attached to the group
  std::uint32_t meeting = 0;  // how often all workers have met: steps of before are no news
  std::int64_t steps = 0;

  bool isAheadOf(const StepNotice& other) const {
    return meeting != other.meeting ? meeting > other.meeting : steps > other.steps;
  }
};
static_assert(sizeof(StepNotice) == 24, "the message is a wire format");

// The first four bytes, by which messages of one channel are told apart; 0 when there are none.
std::uint32_t magicOf(std::span<const std::byte> bytes);
// MalformedMessage for what breaks a rule: another sender than `source`, ranks outside 0..size-1,
// negative numbers.
Heartbeat parseHeartbeat(std::span<const std::byte> bytes, int source);
LaggardQuery parseLaggardQuery(std::span<const std::byte> bytes, int size);
StepNotice parseStepNotice(std::span<const std::byte> bytes, int size);

// Decides when a peer has been silent for too long. Times come from the caller, on any steady clock.
//
// What counts is silence that this process watched: a tick that comes late (the machine slept, this process was
// stopped) counts as one in time, because the peer's messages may lie unread. Before the first message nobody is
// watched: the peer may not be there yet, or send none.
class SilenceWatch {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::steady_clock::duration;

  // limit: silence from which the peer is suspected. interval: between ticks, at most half of the limit.
  SilenceWatch(Duration limit, Duration interval) : limit_(limit), interval_(interval) {}

  void heard() {
    watching_ = true;
    silence_ = Duration::zero();
  }
  // To be called once an interval. The silence so far, once it has reached the limit.
  std::optional<Duration> tick(Time now);

 private:
  const Duration limit_;
  const Duration interval_;
  bool watching_ = false;
  Duration silence_ = Duration::zero();
  std::optional<Time> last_;
};

}  // namespace torchext::core
