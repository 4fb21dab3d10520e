// Who averages with whom: Prague's group generator (Luo et al., ASPLOS 2020, sections 4 and 5).
//
// What it is
//   A deterministic state machine. It is told that a worker asks for a group, has finished one, pauses or left; it
//   answers with deliveries: "tell worker w that its next group is g". It knows no tensor, socket, clock or thread:
//   time comes in as a number, randomness from a seed, so that 1e5 schedules replay in a test in seconds.
//
// Call order
//   request(w) -> exactly one Delivery for w, now or from a later call (of any worker, or of tick).
//   complete(w, id) once w has finished the group it was delivered; only then may w request again.
//   pause(w): w will ask for nothing until its next request (evaluation, checkpoint, end of training). The groups that
//   already name w are delivered to it all at once, in order, in the returned deliveries (id 0 marks the end); w must
//   run them, then call complete for each. Nobody puts w into a new group until it requests again.
//
// Invariants (property-tested)
//   * A group is appended to the FIFO of all its members in one call: any two groups stand in the same order in every
//     FIFO they share, so waiting for the head of a FIFO can never be circular.
//   * Groups of one division are disjoint; members are sorted, unique, and contain only active workers.
//   * A worker that is slowdown_threshold or more requests behind the initiator is in no division but its own.
//
// Threads: none; the owner serializes calls.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace torchext::core {

enum class GeneratorKind { kRandom, kDivision, kInterIntra, kSmart, kReadySet };

// "random", "division", "inter-intra", "smart", "ready-set"; throws std::invalid_argument naming the choices.
// ("static" needs no generator: see static_schedule.h.)
GeneratorKind parseGeneratorKind(const std::string& name);
const char* toString(GeneratorKind kind);

struct Group {
  std::uint64_t id = 0;      // 1, 2, 3 ... in the order of creation; 0: "no group" (the end of a pause's drain)
  std::vector<int> members;  // sorted, unique; size 1 means "nothing to average this time"
};

struct Delivery {
  int worker = -1;
  Group group;
};

struct GeneratorOptions {
  int world_size = 1;                // workers, 1 or more
  int group_size = 2;                // members a group aims for, 1..world_size
  GeneratorKind kind = GeneratorKind::kSmart;
  std::vector<int> host_of;          // host_of[rank] = dense host index; empty: all ranks on one host
  std::int64_t slowdown_threshold = 0;  // requests behind the initiator from which a worker is filtered; 0: no filter
  std::uint64_t sync_every = 0;      // every sync_every-th division is one group of all active workers; 0: never
  double deadline_factor = 3.0;      // ready-set: k in median + k * MAD of the arrival gaps
  std::uint64_t seed = 0;
};

class GroupGenerator {
 public:
  virtual ~GroupGenerator() = default;

  // now: seconds on any monotonic clock (used by ready-set only).
  virtual std::vector<Delivery> request(int worker, double now) = 0;
  virtual std::vector<Delivery> complete(int worker, std::uint64_t group_id, double now) = 0;
  virtual std::vector<Delivery> pause(int worker, double now) = 0;

  // Ready-set: the next time at which tick() has something to do; nothing for the others.
  virtual std::optional<double> nextDeadline() const = 0;
  virtual std::vector<Delivery> tick(double now) = 0;

  // Requests of a worker so far: the iteration count c_i of the paper.
  virtual std::int64_t requestCount(int worker) const = 0;
};

// Validates the options (std::invalid_argument with the name, the value and the allowed range).
std::unique_ptr<GroupGenerator> makeGroupGenerator(const GeneratorOptions& options);

}  // namespace torchext::core
