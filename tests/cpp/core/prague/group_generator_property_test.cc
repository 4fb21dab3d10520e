// Random schedules with random delays: whatever the order in which workers ask, finish, pause, meet, return and die,
// nobody waits for ever, and the invariants of group_generator.h hold after every call.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include "core/base/check.h"
#include "core/base/random.h"
#include "core/prague/group_generator_base.h"

namespace torchext::core {
namespace {

#ifdef TORCHEXT_SANITIZED
constexpr int kSchedules = 3000;
#else
constexpr int kSchedules = 100000;
#endif

struct Schedule {
  GeneratorOptions generator;
  int steps = 60;  // calls by workers before everybody comes to an end
  bool pauses = false;
  bool meetings = false;  // now and then all come to a call that all make, and leave it when all are there
  bool deaths = false;
  double pace = 1.0;  // seconds between two calls at most
  std::uint64_t seed = 0;
};

// Plays the workers and the transport. A group is averaged once all its living members have it as their next one.
class Driver {
 public:
  explicit Driver(const Schedule& schedule)
      : schedule_(schedule),
        options_(schedule.generator),
        generator_(makeGroupGenerator(options_)),
        base_(dynamic_cast<GroupGeneratorBase&>(*generator_)),
        random_(schedule.seed),
        workers_(index(options_.world_size)) {}

  // False at the first failure (gtest has it then); the caller adds the seed.
  bool run() {
    for (int step = 0; step < schedule_.steps && !::testing::Test::HasFailure(); ++step) {
      act();
    }
    // The end: everybody who is free pauses; what is under way must come to an end by itself.
    for (int guard = 0; !::testing::Test::HasFailure(); ++guard) {
      if (guard > 1000 * options_.world_size) {
        ADD_FAILURE() << "no end in sight";
      } else if (!wind()) {
        break;
      }
    }
    for (int worker = 0; worker < options_.world_size; ++worker) {
      EXPECT_TRUE(base_.pending(worker).empty());
    }
    return !::testing::Test::HasFailure();
  }

 private:
  enum class State { kComputing, kWaiting, kRunning, kPaused, kDead };
  struct Worker {
    State state = State::kComputing;
    bool paused = false;              // kRunning: what is left of a drain
    bool met = false;                 // has come to the meeting under way
    std::deque<std::uint64_t> local;  // delivered, not averaged
    std::uint64_t last_id = 0;
    std::int64_t requests = 0;
    double count = 0;  // requests as the filter counts them, where nobody pauses
  };

  int randomWorker() { return static_cast<int>(random_.below(static_cast<std::uint32_t>(options_.world_size))); }

  void act() {
    now_ += schedule_.pace * random_.uniform();
    tick();
    const int worker = randomWorker();
    Worker& state = workers_[index(worker)];
    const auto chance = random_.below(100);
    if (schedule_.deaths && chance == 0 && state.state != State::kDead && alive() > 1) {
      die(worker);
    } else if (meeting_ && (state.state == State::kComputing || state.state == State::kPaused)) {
      meet(worker);
    } else if (state.state == State::kComputing && schedule_.meetings && chance < 5) {
      meeting_ = true;
      meet(worker);
    } else if (state.state == State::kComputing && schedule_.pauses && chance < 10) {
      pause(worker);
    } else if (state.state == State::kComputing || state.state == State::kPaused) {
      request(worker);
    } else if (!finishOne(worker) && random_.below(4) == 0) {
      // Time passes without this worker.
      now_ += 0.1;
    }
  }

  // One call towards the end; false when all is done.
  bool wind() {
    tick();
    bool open = false;
    const int first = randomWorker();
    for (int i = 0; i < options_.world_size; ++i) {
      const int worker = (first + i) % options_.world_size;
      switch (workers_[index(worker)].state) {
        case State::kComputing:
          pause(worker);
          return true;
        case State::kRunning:
          if (finishOne(worker)) {
            return true;
          }
          open = true;
          break;
        case State::kWaiting:
          open = true;
          break;
        case State::kPaused:
        case State::kDead:
          break;
      }
    }
    if (open) {
      const auto deadline = generator_->nextDeadline();
      if (deadline) {
        now_ = std::max(now_, *deadline);
        return true;
      }
      ADD_FAILURE() << "deadlock: nobody can go on, somebody waits";
    }
    return false;
  }

  int alive() const {
    return static_cast<int>(std::count_if(workers_.begin(), workers_.end(),
                                          [](const Worker& worker) { return worker.state != State::kDead; }));
  }

  void tick() {
    const auto deadline = generator_->nextDeadline();
    if (deadline && now_ >= *deadline) {
      call(-1, [&] { return generator_->tick(now_); });
    }
  }

  void request(int worker) {
    Worker& state = workers_[index(worker)];
    state.state = State::kWaiting;
    countRequest(state);
    const bool had_pending = !base_.pending(worker).empty();
    const std::uint64_t pending = had_pending ? base_.pending(worker).front() : 0;
    const auto deliveries = call(worker, [&] { return generator_->request(worker, now_); });
    EXPECT_EQ(generator_->requestCount(worker), state.requests);
    if (had_pending) {
      ASSERT_FALSE(deliveries.empty());
      EXPECT_EQ(deliveries[0].group.id, pending) << "a pending group comes first";
    }
  }

  void pause(int worker) {
    workers_[index(worker)].state = State::kPaused;
    call(worker, [&] { return generator_->pause(worker, now_); });
  }

  // Nobody leaves before all living workers are there, with nothing left to run.
  void meet(int worker) {
    Worker& state = workers_[index(worker)];
    if (!state.met) {
      state.met = true;
      state.state = State::kPaused;
      call(worker, [&] { return generator_->meet(worker, now_); });
    }
    meeting_ = std::any_of(workers_.begin(), workers_.end(), [](const Worker& other) {
      return other.state != State::kDead && !(other.met && other.state == State::kPaused);
    });
    if (!meeting_) {
      for (Worker& other : workers_) {
        other.met = false;
      }
    }
  }

  void die(int worker) {
    Worker& state = workers_[index(worker)];
    state.state = State::kDead;
    state.local.clear();
    call(worker, [&] { return generator_->leave(worker, now_); });
    EXPECT_TRUE(base_.pending(worker).empty());
  }

  // Averages the next group of worker if all living members are there. Members acknowledge in random order.
  bool finishOne(int worker) {
    const Worker& state = workers_[index(worker)];
    if (state.local.empty()) {
      return false;
    }
    const std::uint64_t id = state.local.front();
    std::vector<int> members = members_.at(id);
    members.erase(std::remove_if(members.begin(), members.end(),
                                 [&](int member) { return workers_[index(member)].state == State::kDead; }),
                  members.end());
    const bool all_there = std::all_of(members.begin(), members.end(), [&](int member) {
      const auto& local = workers_[index(member)].local;
      return !local.empty() && local.front() == id;
    });
    if (!all_there) {
      return false;
    }
    random_.shuffle(members);
    for (const int member : members) {
      Worker& done = workers_[index(member)];
      done.local.pop_front();
      if (done.local.empty()) {
        done.state = done.paused ? State::kPaused : State::kComputing;
        done.paused = false;
      }
    }
    for (const int member : members) {
      call(member, [&] { return generator_->complete(member, id, now_); });
    }
    return true;
  }

  template <typename Call>
  std::vector<Delivery> call(int worker, const Call& make) {
    const std::uint64_t before = base_.lastId();
    const std::vector<bool> busy = busyWorkers();
    const auto waiting = std::count_if(workers_.begin(), workers_.end(),
                                       [](const Worker& each) { return each.state == State::kWaiting; });
    std::vector<Delivery> deliveries = make();
    for (const auto& delivery : deliveries) {
      take(delivery);
    }
    if (base_.lastId() != before) {
      // Of those that wait for a meeting to end each may make a division.
      checkNewGroups(worker, before, busy, std::max(1, static_cast<int>(waiting)));
    }
    return deliveries;
  }

  void take(const Delivery& delivery) {
    Worker& state = workers_[index(delivery.worker)];
    if (delivery.group.id == 0) {
      EXPECT_EQ(state.state, State::kPaused);
      if (!state.local.empty()) {
        state.state = State::kRunning;
        state.paused = true;
      }
      return;
    }
    ASSERT_TRUE(state.state == State::kWaiting || state.state == State::kPaused) << "a delivery nobody asked for";
    EXPECT_GT(delivery.group.id, state.last_id) << "two groups in different orders";
    state.last_id = delivery.group.id;
    state.local.push_back(delivery.group.id);
    if (state.state == State::kWaiting) {
      state.state = State::kRunning;
    }
    const auto [known, first] = members_.emplace(delivery.group.id, delivery.group.members);
    EXPECT_EQ(known->second, delivery.group.members) << "members of a group disagree about it";
    EXPECT_EQ(std::count(known->second.begin(), known->second.end(), delivery.worker), 1);
  }

  // A quarter of a threshold's share of the way to the middle, then one more.
  void countRequest(Worker& state) {
    ++state.requests;
    std::vector<double> counts;
    for (const Worker& worker : workers_) {
      if (worker.state != State::kDead) {
        counts.push_back(worker.count);
      }
    }
    std::sort(counts.begin(), counts.end());
    if (options_.slowdown_threshold > 0) {
      state.count +=
          (counts[counts.size() / 2] - state.count) / (4.0 * static_cast<double>(options_.slowdown_threshold));
    }
    state.count += 1;
  }

  std::vector<bool> busyWorkers() const {
    std::vector<bool> busy;
    if (options_.kind != GeneratorKind::kRandom) {
      return busy;  // nobody asks
    }
    for (int worker = 0; worker < options_.world_size; ++worker) {
      busy.push_back(!workers_[index(worker)].local.empty() || !base_.pending(worker).empty());
    }
    return busy;
  }

  void checkNewGroups(int initiator, std::uint64_t before, const std::vector<bool>& busy, int divisions) {
    std::map<int, int> times;
    for (std::uint64_t id = before + 1; id <= base_.lastId(); ++id) {
      const auto& members = base_.group(id).members;
      ASSERT_FALSE(members.empty());
      EXPECT_EQ(std::adjacent_find(members.begin(), members.end(), std::greater_equal<>()), members.end());
      for (const int member : members) {
        ++times[member];
        const Worker& state = workers_[index(member)];
        EXPECT_TRUE(state.state != State::kPaused && state.state != State::kDead) << "not active: " << member;
        if (options_.kind == GeneratorKind::kRandom) {
          EXPECT_FALSE(member != initiator && busy[index(member)]) << "locked: " << member;
        }
        if (members.size() > 1 && !schedule_.pauses && options_.slowdown_threshold > 0 && member != initiator &&
            filters()) {
          EXPECT_LT(workers_[index(initiator)].count - state.count, static_cast<double>(options_.slowdown_threshold))
              << "in a division of a worker that far ahead: " << member;
        }
      }
    }
    const bool division = options_.kind == GeneratorKind::kDivision;
    const bool two_rounds = filters() && !division;
    for (const auto& [worker, count] : times) {
      const auto& fifo = base_.pending(worker);
      EXPECT_TRUE(std::is_sorted(fifo.begin(), fifo.end())) << "two groups in different orders";
      if (division || two_rounds) {
        EXPECT_LE(count, (two_rounds ? 2 : 1) * divisions) << "groups of one round overlap in worker " << worker;
      }
    }
  }

  bool filters() const { return options_.kind != GeneratorKind::kRandom && options_.kind != GeneratorKind::kReadySet; }

  Schedule schedule_;
  GeneratorOptions options_;
  std::unique_ptr<GroupGenerator> generator_;
  GroupGeneratorBase& base_;
  Random random_;
  std::vector<Worker> workers_;
  std::map<std::uint64_t, std::vector<int>> members_;
  bool meeting_ = false;
  double now_ = 0;
};

constexpr GeneratorKind kKinds[] = {GeneratorKind::kRandom, GeneratorKind::kDivision, GeneratorKind::kInterIntra,
                                    GeneratorKind::kSmart, GeneratorKind::kReadySet};

Schedule randomSchedule(GeneratorKind kind, std::uint64_t seed) {
  Random random(seed);
  Schedule schedule;
  auto& options = schedule.generator;
  options.kind = kind;
  options.world_size = 1 + static_cast<int>(random.below(10));
  options.group_size = 1 + static_cast<int>(random.below(static_cast<std::uint32_t>(options.world_size)));
  const int host_size = 1 + static_cast<int>(random.below(4));
  for (int worker = 0; worker < options.world_size; ++worker) {
    options.host_of.push_back(worker / host_size);
  }
  options.slowdown_threshold = random.below(4);
  options.sync_every = random.below(3) == 0 ? 1 + random.below(6) : 0;
  options.deadline_factor = random.uniform() * 4;
  options.seed = seed;
  schedule.steps = 20 + static_cast<int>(random.below(80));
  schedule.pauses = random.below(2) == 0;
  schedule.deaths = random.below(3) == 0;
  schedule.meetings = schedule.pauses && random.below(2) == 0;
  schedule.pace = schedule.meetings && random.below(2) == 0 ? 0.01 : 1.0;
  schedule.seed = seed + 1;
  return schedule;
}

class RandomSchedules : public ::testing::TestWithParam<GeneratorKind> {};

TEST_P(RandomSchedules, KeepTheInvariants) {
  for (std::uint64_t seed = 0; seed < kSchedules / std::size(kKinds); ++seed) {
    if (!Driver(randomSchedule(GetParam(), seed)).run()) {
      FAIL() << toString(GetParam()) << " with seed " << seed;
    }
  }
}

TEST_P(RandomSchedules, KeepTheInvariantsAtThousandRanks) {
  constexpr int kRanks = 1024;
  Schedule schedule = randomSchedule(GetParam(), 11);
  schedule.generator.world_size = kRanks;
  schedule.generator.group_size = 8;
  schedule.generator.host_of.clear();
  for (int rank = 0; rank < kRanks; ++rank) {
    schedule.generator.host_of.push_back(rank / 8);
  }
  schedule.steps = kSchedules / 33;
  schedule.pauses = true;
  schedule.meetings = false;  // too many for all to come to one
  schedule.deaths = true;
  EXPECT_TRUE(Driver(schedule).run());
}

INSTANTIATE_TEST_SUITE_P(Kinds, RandomSchedules, ::testing::ValuesIn(kKinds), [](const auto& parameter) {
  std::string name = toString(parameter.param);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace torchext::core
