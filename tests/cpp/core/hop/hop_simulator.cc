#include "hop_simulator.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <utility>

#include "core/base/check.h"
#include "core/base/random.h"
#include "hop_worker_model.h"

namespace torchext::core::testing {
namespace {

class Simulation {
 public:
  Simulation(const CommunicationGraph& graph, const std::vector<std::vector<int>>& bounds,
             const HopSimulationOptions& options)
      : graph_(graph), bounds_(bounds), options_(options), mode_(options.mode), random_(options.seed) {
    last_ = options.iterations > 0 ? options.iterations : std::numeric_limits<std::int64_t>::max();
    const int lead = largestLead(mode_, graph);
    for (int rank = 0; rank < graph.size(); ++rank) {
      Worker worker{.updates = UpdateQueue({.senders = graph.inNeighbours(rank),
                                            .weights = graph.inWeights(rank),
                                            .max_ahead = lead,
                                            .backup_workers = mode_.backup_workers,
                                            .staleness = mode_.staleness}),
                    .in = std::vector<Inbox>(graph.inNeighbours(rank).size()),
                    .out = {}};
      for (const int to : graph.outNeighbours(rank)) {
        if (to != rank) {
          // Without tokens the queues are there and nobody asks them.
          const int max_ig = std::max(1, mode_.max_iteration_gap);
          worker.out.push_back(Outgoing{.to = to, .tokens = TokenQueue(max_ig, graph.pathLength(to, rank))});
        }
      }
      workers_.push_back(std::move(worker));
    }
    result_.computed.resize(workers_.size());
    result_.reached.resize(workers_.size());
  }

  HopSimulationResult run() {
    for (int rank = 0; rank < graph_.size(); ++rank) {
      // Everybody is in iteration 0 from the start: no token is given for it.
      at(rank).stands_at = 0;
    }
    for (int rank = 0; rank < graph_.size(); ++rank) {
      startIteration(rank, 0);
    }
    while (!events_.empty() && result_.violation.empty()) {
      const Event event = events_.top();
      if (options_.duration > 0 && event.time > options_.duration) {
        break;
      }
      events_.pop();
      now_ = event.time;
      handle(event);
    }
    result_.time = now_;
    for (int rank = 0; rank < graph_.size(); ++rank) {
      result_.reached[index(rank)] = at(rank).iteration;
      result_.finished = result_.finished && (options_.duration > 0 || at(rank).phase == Phase::kFinished);
    }
    return result_;
  }

 private:
  Worker& at(int rank) { return workers_[index(rank)]; }

  Outgoing& edge(int from, int to) {
    auto& out = at(from).out;
    return *std::find_if(out.begin(), out.end(), [to](const Outgoing& one) { return one.to == to; });
  }

  void schedule(double delay, What what, int worker, int from, std::int64_t tag) {
    scheduleAt(now_ + delay, what, worker, from, tag);
  }

  void scheduleAt(double time, What what, int worker, int from, std::int64_t tag) {
    events_.push(Event{time, ++order_, what, worker, from, tag});
  }

  double spread(double mean, double jitter) {
    return mean > 0 && jitter > 0 ? mean * (1.0 + jitter * (2.0 * random_.uniform() - 1.0)) : mean;
  }

  template <typename... Parts>
  void check(bool holds, const Parts&... parts) {
    if (!holds && result_.violation.empty()) {
      result_.violation = concat(parts...);
    }
  }

  void handle(const Event& event) {
    Worker& worker = at(event.worker);
    switch (event.what) {
      case What::kComputed:
        ++result_.computed[index(event.worker)];
        worker.phase = Phase::kReceiving;
        break;
      case What::kArrived:
        inbox(event.worker, event.from).waiting.push_back(event.tag);
        admit(event.worker, event.from);
        break;
      case What::kStored:
        inbox(event.worker, event.from).storing = false;
        worker.updates.enqueue(event.from, event.tag);
        admit(event.worker, event.from);
        break;
      case What::kToken: {
        Outgoing& out = edge(event.worker, event.from);
        const int count = static_cast<int>(event.tag);
        out.tokens_under_way -= count;
        out.tokens.give(count);
        break;
      }
      case What::kAck:
        edge(event.worker, event.from).acked = event.tag;
        sendIfAllowed(event.worker);
        break;
      case What::kReduced:
        reduced(event.worker);
        break;
    }
    proceed(event.worker);
  }

  Inbox& inbox(int rank, int sender) {
    const auto& senders = graph_.inNeighbours(rank);
    return at(rank)
        .in[static_cast<std::size_t>(std::lower_bound(senders.begin(), senders.end(), sender) - senders.begin())];
  }

  // Admits what has arrived of one sender, as far as that goes.
  void admit(int rank, int sender) {
    Inbox& box = inbox(rank, sender);
    while (!box.storing && !box.waiting.empty()) {
      const std::int64_t tag = box.waiting.front();
      const Admission admission = at(rank).updates.admit(sender, tag);
      if (admission == Admission::kWait) {
        ++result_.held_back;
        return;
      }
      box.waiting.pop_front();
      if (admission == Admission::kStore) {
        const double delay = options_.store_time > 0 ? spread(options_.store_time, 1.0) : 0.0;
        if (delay > 0) {
          box.storing = true;
          schedule(delay, What::kStored, rank, sender, tag);
        } else {
          at(rank).updates.enqueue(sender, tag);
        }
      }
    }
  }

  void enqueueOwn(int rank, std::int64_t tag) {
    check(at(rank).updates.admit(rank, tag) == Admission::kStore, "own model not stored");
    at(rank).updates.enqueue(rank, tag);
  }

  void startIteration(int rank, std::int64_t iteration) {
    Worker& worker = at(rank);
    worker.iteration = iteration;
    if (iteration >= last_) {
      worker.phase = Phase::kFinished;
      for (const int consumer : graph_.inNeighbours(rank)) {
        if (consumer != rank) {
          edge(consumer, rank).tokens.release();
          proceed(consumer);
        }
      }
      return;
    }
    checkGaps(rank);
    worker.phase = Phase::kComputing;
    enqueueOwn(rank, iteration);
    sendIfAllowed(rank);
    double factor = options_.slowdown.empty() ? 1.0 : options_.slowdown[index(rank)];
    if (options_.slowdown_probability > 0 && random_.uniform() < options_.slowdown_probability) {
      factor *= options_.random_slowdown;
    }
    schedule(factor * spread(1.0, options_.jitter), What::kComputed, rank, rank, iteration);
  }

  void sendIfAllowed(int rank) {
    Worker& worker = at(rank);
    const auto acked = [this, &worker](const Outgoing& out) {
      return !mode_.notify_ack || out.acked >= worker.iteration - 1;
    };
    if (worker.sent >= worker.iteration || worker.phase == Phase::kFinished ||
        !std::all_of(worker.out.begin(), worker.out.end(), acked)) {
      return;
    }
    worker.sent = worker.iteration;
    for (Outgoing& out : worker.out) {
      out.last_arrival = std::max(out.last_arrival, now_ + spread(options_.message_time, options_.message_jitter));
      scheduleAt(out.last_arrival, What::kArrived, out.to, rank, worker.iteration);
    }
  }

  // As far as the worker can go now.
  void proceed(int rank) {
    Worker& worker = at(rank);
    if (worker.phase == Phase::kReceiving && worker.updates.ready()) {
      receive(rank);
    }
    if (worker.phase == Phase::kAdvancing && worker.sent >= worker.iteration) {
      moveOn(rank);
    }
  }

  void receive(int rank) {
    Worker& worker = at(rank);
    const auto taken = worker.updates.dequeue();
    check(taken.size() >= worker.in.size() - index(mode_.backup_workers), "rank ", rank, " took ", taken.size());
    for (const Update& update : taken) {
      const std::int64_t age = worker.stands_at - update.tag;
      check(mode_.staleness > 0 ? age <= mode_.staleness : age == 0, "rank ", rank, " took tag ", update.tag,
            " of rank ", update.sender, " at iteration ", worker.stands_at);
    }
    worker.phase = Phase::kReducing;
    if (options_.reduce_time > 0) {
      schedule(options_.reduce_time, What::kReduced, rank, rank, 0);
    } else {
      reduced(rank);
    }
  }

  void reduced(int rank) {
    Worker& worker = at(rank);
    worker.updates.release();
    worker.phase = Phase::kAdvancing;
    for (const int sender : graph_.inNeighbours(rank)) {
      admit(rank, sender);
      if (mode_.notify_ack && sender != rank) {
        schedule(spread(options_.token_time, options_.message_jitter), What::kAck, sender, rank, worker.iteration);
      }
    }
  }

  void moveOn(int rank) {
    Worker& worker = at(rank);
    if (mode_.hasTokens() && !worker.refreshing) {
      int lag = worker.out.empty() ? 0 : std::numeric_limits<int>::max();
      for (const Outgoing& out : worker.out) {
        lag = std::min(lag, out.tokens.lag());
      }
      const auto jump = std::min<std::int64_t>(plannedJump(mode_, lag), last_ - 1 - worker.iteration);
      if (jump > 1) {
        worker.refreshing = true;
        result_.skipped += jump - 1;
        standAt(rank, worker.iteration + jump - 1);
        enqueueOwn(rank, worker.stands_at);
        worker.phase = Phase::kReceiving;
        proceed(rank);
        return;
      }
    }
    const auto has_token = [](const Outgoing& out) { return out.tokens.canTake(); };
    if (mode_.hasTokens() && !std::all_of(worker.out.begin(), worker.out.end(), has_token)) {
      return;
    }
    worker.refreshing = false;
    standAt(rank, worker.stands_at + 1);
    startIteration(rank, worker.stands_at);
  }

  // Takes tokens up to `iteration`, and gives as many.
  void standAt(int rank, std::int64_t iteration) {
    Worker& worker = at(rank);
    const int count = static_cast<int>(iteration - worker.stands_at);
    worker.stands_at = iteration;
    worker.updates.advance(iteration);
    if (!mode_.hasTokens()) {
      return;
    }
    for (Outgoing& out : worker.out) {
      out.tokens.take(count);
    }
    for (const int consumer : graph_.inNeighbours(rank)) {
      if (consumer != rank) {
        edge(consumer, rank).tokens_under_way += count;
        schedule(spread(options_.token_time, options_.message_jitter), What::kToken, consumer, rank, count);
        checkTokens(consumer, edge(consumer, rank));
      }
    }
    for (const Outgoing& out : worker.out) {
      checkTokens(rank, out);
    }
  }

  void checkTokens(int consumer, const Outgoing& out) {
    if (!out.tokens.released()) {
      const std::int64_t expected = mode_.max_iteration_gap + at(out.to).stands_at - at(consumer).stands_at;
      check(out.tokens.size() + out.tokens_under_way == expected, "TokenQ(", out.to, " -> ", consumer, ") has ",
            out.tokens.size(), " + ", out.tokens_under_way, " under way, expected ", expected);
      check(expected <= out.tokens.capacity(), "TokenQ above its capacity ", out.tokens.capacity());
    }
  }

  void checkGaps(int rank) {
    for (int other = 0; other < graph_.size(); ++other) {
      const std::int64_t gap = at(rank).iteration - at(other).stands_at;
      const std::int64_t bound = bounds_[index(rank)][index(other)];
      check(gap <= bound, "Iter(", rank, ") - Iter(", other, ") = ", gap, " > ", bound, " at time ", now_);
      result_.tight += other != rank && gap == bound ? 1 : 0;
    }
  }

  const CommunicationGraph& graph_;
  const std::vector<std::vector<int>>& bounds_;
  HopSimulationOptions options_;
  HopMode mode_;
  Random random_;
  std::vector<Worker> workers_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  HopSimulationResult result_;
  std::int64_t last_ = 0;
  double now_ = 0.0;
  std::uint64_t order_ = 0;
};

}  // namespace

HopSimulationResult simulateHop(const CommunicationGraph& graph, const std::vector<std::vector<int>>& bounds,
                                const HopSimulationOptions& options) {
  return Simulation(graph, bounds, options).run();
}

std::vector<std::vector<int>> gapBounds(const HopMode& mode, const CommunicationGraph& graph) {
  std::vector<std::vector<int>> lengths;
  lengths.reserve(index(graph.size()));
  for (int rank = 0; rank < graph.size(); ++rank) {
    lengths.push_back(graph.pathLengthsFrom(rank));
  }
  auto bounds = lengths;
  for (int i = 0; i < graph.size(); ++i) {
    for (int j = 0; j < graph.size(); ++j) {
      bounds[index(i)][index(j)] = iterationGapBound(mode, lengths[index(j)][index(i)], lengths[index(i)][index(j)]);
    }
  }
  return bounds;
}

}  // namespace torchext::core::testing
