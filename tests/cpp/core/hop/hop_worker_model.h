// The state of the workers in hop_simulator.cc.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "core/hop/token_queue.h"
#include "core/hop/update_queue.h"

namespace torchext::core::testing {

enum class What { kComputed, kArrived, kStored, kToken, kAck, kReduced };

struct Event {
  double time;
  std::uint64_t order;  // ties in the order of scheduling
  What what;
  int worker;        // to whom it happens
  int from;          // sender or owner
  std::int64_t tag;  // of a model or an ACK; how many tokens
  bool operator>(const Event& other) const { return time != other.time ? time > other.time : order > other.order; }
};

enum class Phase { kComputing, kReceiving, kReducing, kAdvancing, kFinished };

// What a worker keeps of one in-neighbour.
struct Inbox {
  std::deque<std::int64_t> waiting;  // tags that have arrived and are not admitted
  bool storing = false;
};

// What a worker keeps of one out-neighbour.
struct Outgoing {
  int to;
  TokenQueue tokens;
  int tokens_under_way = 0;
  std::int64_t acked = -1;
  double last_arrival = 0.0;  // messages do not overtake each other
};

struct Worker {
  Phase phase = Phase::kComputing;
  bool refreshing = false;      // receives for the last skipped iteration
  std::int64_t iteration = -1;  // what it computes
  std::int64_t stands_at = -1;  // the same, or the last skipped iteration: what its tokens say
  std::int64_t sent = -1;
  UpdateQueue updates;
  std::vector<Inbox> in;      // like inNeighbours
  std::vector<Outgoing> out;  // outNeighbours without itself
};

}  // namespace torchext::core::testing
