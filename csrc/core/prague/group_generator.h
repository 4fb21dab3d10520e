// GroupGenerator says who averages with whom in Prague (Luo et al., ASPLOS 2020, sections 4 and 5).
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
//   meet(w): as pause(w), in front of a call that all workers make (a collective). When all have met, all come back:
//   a request that finds nothing pending waits until all others have asked, too, or for some time (rejoin_window.h).
//   Their turns come then, in the order in which they asked, and each may find itself in the group of one before it.
//   leave(w): w is gone for good.
//   Every call may return deliveries for any worker, not only for its caller: pass on all of them, in order.
//
// Kinds
//   random       a request draws a random group around its worker. It waits until no member has a group it has not
//                completed, then all members have this one. A waiting draw that names a worker who pauses or leaves is
//                drawn again; a waiting worker whom somebody else's group takes gets that one instead of its own. No
//                slowdown filter: workers that had to wait would count as slow, and wait even longer.
//   division     a request of a worker that has no pending group partitions all idle workers into random disjoint
//                groups. Idle: active, no group pending or under way. Where these do not make full groups, random
//                workers fill them up that have none pending and one under way that all its members have come to.
//                Sizes differ by one at most, and nobody is left alone unless there is nobody else: the remainder makes
//                groups larger or smaller than group_size.
//   inter-intra  a division emits two rounds. First one head a host (heads rotate): the heads in random groups across
//                hosts, the others of a host together. Then every host inside itself. Idle workers only. A host's rest
//                is one group whatever group_size says: what it costs stays inside the host. Where idle workers are on
//                one host only, a plain division.
//   smart        inter-intra where host_of has more than one host, division elsewhere. Give it a slowdown_threshold.
//                With rack_of the two rounds are across racks and inside them: the heads of racks, and the rest of each
//                rack in groups of about group_size.
//   ready-set    the first arrival opens a slot; when group_size have arrived, or at the deadline, those who are there
//                are the group. The deadline is (group_size - 1) * (median + deadline_factor * MAD) of the recent gaps
//                between arrivals after the opening; there is none before world_size gaps are known. A worker that is
//                alone at the deadline is joined by the next arrival. Workers of one speed keep meeting each other
//                (update isolation): set sync_every, which nothing else replaces here.
//
// Invariants (property-tested)
//   * A group is appended to the FIFO of all its members in one call: any two groups stand in the same order in every
//     FIFO they share, so waiting for the head of a FIFO can never be circular.
//   * Groups of one division are disjoint; members are sorted, unique, and contain only active workers.
//   * A worker that is slowdown_threshold or more requests behind the initiator is in no division but its own. So is
//   one
//     that far behind the middle one of the candidates: a slow worker's request must not make fast ones wait for
//     another slow worker. Of its own two-round division it is in the first round only: there it waits, in the second
//     others would wait for it. Requests behind are counted with the steps that others could have made while they
//     waited, or a straggler whom everybody waits for would never fall behind (slowdown_filter.h). A pause does not
//     count: a worker returns as far behind the foremost as it was.
//
// Errors: std::out_of_range for a worker that does not exist; std::logic_error for a call out of order (a request while
// one is unanswered or a group is not completed, a completion of a group that is not under way, any call for a worker
// that left). The state is unchanged by a call that throws.
// Threads: none; the owner serializes calls.
#pragma once

#include <cstdint>
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
  int world_size = 1;                          // workers, 1 or more
  int group_size = 2;                          // members a group aims for, 1..world_size
  GeneratorKind kind = GeneratorKind::kSmart;  // see Kinds above
  std::vector<int> host_of = {};               // host_of[rank] = dense host index; empty: all ranks on one host
  std::vector<int> rack_of = {};               // smart: rack_of[rank], dense; empty: the racks are not known
  std::int64_t slowdown_threshold = 0;         // requests behind the initiator that filter a worker out; 0: no filter
  std::uint64_t sync_every = 0;  // every sync_every-th division (random: draw, ready-set: slot) is one group of all
                                 // active workers that are not filtered; 0: never
  double deadline_factor = 3.0;  // ready-set: k in median + k * MAD of the arrival gaps; 0 or more
  double longest_wait = 10.0;    // seconds that a request waits at most for others that have met, see meet; 0: none
  std::uint64_t seed = 0;        // equal seeds and calls give equal groups, on every platform
};

class GroupGenerator {
 public:
  virtual ~GroupGenerator() = default;

  // now: seconds on any monotonic clock, the same for all calls: the deadlines and the slowdown filter use it.
  virtual std::vector<Delivery> request(int worker, double now) = 0;
  virtual std::vector<Delivery> complete(int worker, std::uint64_t group_id, double now) = 0;
  // Pausing twice is harmless: the second call returns the end mark alone.
  virtual std::vector<Delivery> pause(int worker, double now) = 0;
  // The same; also after pause() without a request in between, if the worker has come to the call meanwhile.
  virtual std::vector<Delivery> meet(int worker, double now) = 0;

  // worker died. It is taken out of every group that nobody has been told of yet. A group that somebody has been told
  // of stays as it is for all its members, so that they agree on it: they fail or time out in it together, then
  // complete it. Nobody waits for worker here any more; leaving twice is harmless.
  virtual std::vector<Delivery> leave(int worker, double now) = 0;

  // The next time at which tick() has something to do: a slot of ready-set closes, or who has met is waited for no
  // more. Ask after every call.
  virtual std::optional<double> nextDeadline() const = 0;
  virtual std::vector<Delivery> tick(double now) = 0;

  // Requests of a worker so far: the iteration count c_i of the paper.
  virtual std::int64_t requestCount(int worker) const = 0;
};

// Validates the options (std::invalid_argument with the name, the value and the allowed range). inter-intra needs
// host_of. Every worker starts active, computing its first step: a first request may put all of them into groups.
std::unique_ptr<GroupGenerator> makeGroupGenerator(const GeneratorOptions& options);

}  // namespace torchext::core
