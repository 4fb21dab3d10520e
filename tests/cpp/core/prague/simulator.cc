#include "simulator.h"

#include <algorithm>
#include <numeric>
#include <queue>
#include <stdexcept>
#include <unordered_map>

#include "core/base/check.h"
#include "core/base/random.h"

namespace torchext::core::testing {
namespace {

struct Event {
  double time;
  std::uint64_t order;  // ties in the order of scheduling
  int worker;           // computed its step, or has averaged with `group`
  std::uint64_t group;  // 0: the step
  bool operator>(const Event& other) const { return time != other.time ? time > other.time : order > other.order; }
};

double computeTime(const SimulationOptions& options, int worker, Random& random) {
  const double factor = options.slowdown.empty() ? 1.0 : options.slowdown[index(worker)];
  return factor * (1.0 + options.jitter * (2.0 * random.uniform() - 1.0));
}

class Simulation {
 public:
  explicit Simulation(const SimulationOptions& options)
      : options_(options), generator_(makeGroupGenerator(options.generator)), random_(options.seed) {
    const auto workers = index(options.generator.world_size);
    result_.iterations.resize(workers);
    result_.lone.resize(workers);
    result_.waited_for.resize(workers);
    told_at_.resize(workers);
    computed_at_.resize(workers);
    result_.meetings.resize(workers * workers);
  }

  SimulationResult run() {
    for (int worker = 0; worker < options_.generator.world_size; ++worker) {
      startCompute(worker);
    }
    while (now_ < options_.duration) {
      const auto deadline = generator_->nextDeadline();
      if (deadline && (events_.empty() || *deadline < events_.top().time)) {
        now_ = std::max(now_, *deadline);
        deliver(generator_->tick(now_));
        continue;
      }
      if (events_.empty()) {
        throw std::logic_error(concat("deadlock at time ", now_));
      }
      const Event event = events_.top();
      events_.pop();
      now_ = event.time;
      if (event.group == 0) {
        computed_at_[index(event.worker)] = now_ + computeTime(options_, event.worker, random_);
        deliver(generator_->request(event.worker, now_));
      } else {
        finish(event.worker, event.group);
      }
    }
    const auto total = std::accumulate(result_.iterations.begin(), result_.iterations.end(), std::int64_t{0});
    result_.gradients_per_time = static_cast<double>(total) / now_;
    return result_;
  }

 private:
  void startCompute(int worker) { schedule(now_ + computeTime(options_, worker, random_), worker, 0); }

  void schedule(double time, int worker, std::uint64_t group) { events_.push(Event{time, ++order_, worker, group}); }

  void deliver(const std::vector<Delivery>& deliveries) {
    for (const auto& delivery : deliveries) {
      auto& arrived = arrived_[delivery.group.id];
      arrived.push_back(delivery.worker);
      told_at_[index(delivery.worker)] = now_;
      if (arrived.size() == delivery.group.members.size()) {
        for (const int member : arrived) {
          result_.waited_for[index(delivery.worker)] += now_ - told_at_[index(member)];
        }
        const double end = now_ + (arrived.size() == 1 ? 0.0 : options_.reduce_time);
        for (const int member : arrived) {
          schedule(end + apart(), member, delivery.group.id);
        }
      }
    }
  }

  double apart() { return options_.ends_apart == 0 ? 0 : options_.ends_apart * random_.uniform(); }

  void finish(int worker, std::uint64_t group) {
    const auto workers = index(options_.generator.world_size);
    const std::vector<int>& members = arrived_.at(group);
    ++result_.iterations[index(worker)];
    result_.lone[index(worker)] += members.size() == 1 ? 1 : 0;
    for (const int other : members) {
      ++result_.meetings[index(worker) * workers + index(other)];
    }
    if (options_.overlapped) {
      schedule(std::max(now_, computed_at_[index(worker)]), worker, 0);
    } else {
      startCompute(worker);
    }
    deliver(generator_->complete(worker, group, now_));
  }

  SimulationOptions options_;
  std::unique_ptr<GroupGenerator> generator_;
  Random random_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::unordered_map<std::uint64_t, std::vector<int>> arrived_;
  SimulationResult result_;
  std::vector<double> told_at_;      // a worker: when it got the group that it is in
  std::vector<double> computed_at_;  // overlapped: when the step that it computes is done
  double now_ = 0;
  std::uint64_t order_ = 0;
};

}  // namespace

SimulationResult simulate(const SimulationOptions& options) { return Simulation(options).run(); }

double allReduceGradientsPerTime(const SimulationOptions& options, double all_reduce_time) {
  Random random(options.seed);
  double now = 0;
  std::int64_t rounds = 0;
  for (; now < options.duration; ++rounds) {
    double slowest = 0;
    for (int worker = 0; worker < options.generator.world_size; ++worker) {
      slowest = std::max(slowest, computeTime(options, worker, random));
    }
    now += slowest + all_reduce_time;
  }
  return static_cast<double>(rounds * options.generator.world_size) / now;
}

}  // namespace torchext::core::testing
