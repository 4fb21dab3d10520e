// Requests after a call that all workers have made: they wait for each other, and never for ever.
#include "core/prague/rejoin_window.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/base/check.h"
#include "core/base/random.h"
#include "core/prague/group_generator.h"

namespace torchext::core {
namespace {

TEST(RejoinWindow, WhoeverHasMetIsAwaitedUntilItAsks) {
  RejoinWindow window(3, 10.0);
  window.onMeet(0, 1.0);
  window.onMeet(2, 2.0);
  EXPECT_FALSE(window.open());
  window.onMeet(1, 3.0);
  EXPECT_TRUE(window.open());
  EXPECT_FALSE(window.deadline().has_value()) << "nobody waits yet";
  window.onRequest(2, 5.0);
  ASSERT_TRUE(window.deadline().has_value());
  EXPECT_DOUBLE_EQ(*window.deadline(), 7.0);  // it took 2 seconds from the meeting: so may the others, once more
  window.onRequest(0, 6.0);
  EXPECT_DOUBLE_EQ(*window.deadline(), 7.0);
  EXPECT_TRUE(window.open());
  window.onRequest(1, 6.5);
  EXPECT_FALSE(window.open());
  EXPECT_FALSE(window.deadline().has_value());
}

TEST(RejoinWindow, TheWaitHasBounds) {
  const auto wait = [](double longest, double step) {
    RejoinWindow window(2, longest);
    window.onMeet(0, 0.0);
    window.onMeet(1, 0.0);
    window.onRequest(0, step);
    return window.open() ? *window.deadline() - step : 0.0;
  };
  EXPECT_DOUBLE_EQ(wait(10.0, 0.0), 0.1);
  EXPECT_DOUBLE_EQ(wait(10.0, 3.0), 3.0);
  EXPECT_DOUBLE_EQ(wait(10.0, 128.0), 10.0);
  EXPECT_DOUBLE_EQ(wait(0.0, 3.0), 0.0);
}

TEST(RejoinWindow, WhoeverIsMissedHasToAskBeforeAllCanMeet) {
  RejoinWindow window(2, 10.0);
  window.onMeet(0, 0.0);
  window.onMeet(1, 0.0);
  window.onRequest(0, 1.0);
  window.expire(1.5);
  EXPECT_TRUE(window.open());
  window.expire(2.0);
  EXPECT_FALSE(window.open());
  window.onMeet(0, 3.0);
  EXPECT_FALSE(window.open()) << "1 has not come to this call, 0 waits for it there";
  window.onRequest(1, 4.0);
  EXPECT_FALSE(window.open());
  window.onMeet(1, 5.0);
  EXPECT_TRUE(window.open());
}

TEST(RejoinWindow, AQuestionAfterTheDeadlineEndsTheWait) {
  RejoinWindow window(3, 10.0);
  for (int worker = 0; worker < 3; ++worker) {
    window.onMeet(worker, 0.0);
  }
  window.onRequest(0, 1.0);
  window.onRequest(1, 2.5);
  EXPECT_FALSE(window.open());
}

TEST(RejoinWindow, WhoeverLeavesIsNotAwaited) {
  RejoinWindow window(3, 10.0);
  for (int worker = 0; worker < 3; ++worker) {
    window.onMeet(worker, 0.0);
  }
  window.onRequest(0, 1.0);
  window.onRequest(1, 1.0);
  window.onLeave(2);
  EXPECT_FALSE(window.open());
  window.onMeet(0, 2.0);
  window.onMeet(1, 2.0);
  EXPECT_TRUE(window.open()) << "all that are left";
}

// What generators make of it ------------------------------------------------------------------------------------------

GeneratorOptions inOneHost(GeneratorKind kind, int world_size, int group_size) {
  GeneratorOptions options;
  options.world_size = world_size;
  options.group_size = group_size;
  options.kind = kind;
  options.host_of.assign(index(world_size), 0);
  options.slowdown_threshold = 4;
  return options;
}

void allMeet(GroupGenerator& generator, int workers, double now) {
  for (int worker = 0; worker < workers; ++worker) {
    EXPECT_EQ(generator.meet(worker, now).size(), 1U);
  }
}

// Workers that train in step, with a call of all after each step, as their clients do: whoever has its group completes
// it, comes to the call, and still runs what names it there.
class Lockstep {
 public:
  Lockstep(const GeneratorOptions& options, std::uint64_t seed)
      : generator_(makeGroupGenerator(options)), random_(seed), workers_(index(options.world_size)) {
    for (int worker = 0; worker < options.world_size; ++worker) {
      meet(worker);
    }
  }

  std::vector<int> everybody() const {
    std::vector<int> workers(workers_.size());
    std::iota(workers.begin(), workers.end(), 0);
    return workers;
  }

  // Those who ask, average and come to the next call, in random orders. The sizes of their groups.
  std::multiset<std::size_t> step(std::vector<int> askers) {
    sizes_.clear();
    random_.shuffle(askers);
    for (const int worker : askers) {
      now_ += 0.01 * random_.uniform();
      Worker& state = workers_[index(worker)];
      state.waiting = true;
      state.met = false;
      take(generator_->request(worker, now_));
    }
    while (goOn(askers) || tick()) {
    }
    for (const int worker : askers) {
      const Worker& state = workers_[index(worker)];
      EXPECT_TRUE(state.met && state.todo.empty()) << "worker " << worker << " waits for ever";
    }
    std::multiset<std::size_t> sizes;
    for (const auto& [id, size] : sizes_) {
      sizes.insert(size);
    }
    return sizes;
  }

 private:
  struct Worker {
    bool waiting = false;
    bool met = false;
    std::deque<Group> todo;
  };

  bool goOn(std::vector<int>& askers) {
    random_.shuffle(askers);
    bool moved = false;
    for (const int worker : askers) {
      const Worker& state = workers_[index(worker)];
      if (!state.todo.empty()) {
        moved = complete(worker) || moved;
      } else if (!state.waiting && !state.met) {
        meet(worker);
        moved = true;
      }
    }
    return moved;
  }

  // A group is averaged when all its members have come to it; each says so when it comes to it.
  bool complete(int worker) {
    const Group group = workers_[index(worker)].todo.front();
    const bool all_there = std::all_of(group.members.begin(), group.members.end(), [&](int member) {
      const auto& todo = workers_[index(member)].todo;
      return !todo.empty() && todo.front().id == group.id;
    });
    if (!all_there && averaged_.count(group.id) == 0) {
      return false;
    }
    averaged_.insert(group.id);
    workers_[index(worker)].todo.pop_front();
    take(generator_->complete(worker, group.id, now_));
    return true;
  }

  void meet(int worker) {
    workers_[index(worker)].met = true;
    take(generator_->meet(worker, now_));
  }

  bool tick() {
    const auto deadline = generator_->nextDeadline();
    if (!deadline) {
      return false;
    }
    now_ = std::max(now_, *deadline);
    take(generator_->tick(now_));
    return true;
  }

  void take(const std::vector<Delivery>& deliveries) {
    for (const Delivery& delivery : deliveries) {
      if (delivery.group.id == 0) {
        continue;
      }
      Worker& state = workers_[index(delivery.worker)];
      state.waiting = false;
      state.todo.push_back(delivery.group);
      sizes_[delivery.group.id] = delivery.group.members.size();
    }
  }

  std::unique_ptr<GroupGenerator> generator_;
  Random random_;
  std::vector<Worker> workers_;
  std::set<std::uint64_t> averaged_;
  std::map<std::uint64_t, std::size_t> sizes_;  // of this step
  double now_ = 0;
};

class AfterAMeeting : public ::testing::TestWithParam<GeneratorKind> {};

TEST_P(AfterAMeeting, RequestsWaitUntilAllHaveAsked) {
  const auto generator = makeGroupGenerator(inOneHost(GetParam(), 4, 4));
  allMeet(*generator, 4, 0.0);
  for (const int worker : {2, 0, 3}) {
    EXPECT_TRUE(generator->request(worker, 1.0).empty());
  }
  const auto deliveries = generator->request(1, 1.5);
  ASSERT_EQ(deliveries.size(), 4U);
  for (const Delivery& delivery : deliveries) {
    EXPECT_EQ(delivery.group.members, (std::vector<int>{0, 1, 2, 3}));
  }
  EXPECT_FALSE(generator->nextDeadline().has_value());
}

TEST_P(AfterAMeeting, NobodyWaitsLongForThoseThatDoNotComeBack) {
  const auto generator = makeGroupGenerator(inOneHost(GetParam(), 4, 4));
  allMeet(*generator, 4, 0.0);
  EXPECT_TRUE(generator->request(0, 1.0).empty());
  EXPECT_TRUE(generator->request(1, 1.5).empty());
  ASSERT_TRUE(generator->nextDeadline().has_value());
  EXPECT_DOUBLE_EQ(*generator->nextDeadline(), 2.0);
  EXPECT_TRUE(generator->tick(1.9).empty());
  const auto deliveries = generator->tick(2.0);
  ASSERT_EQ(deliveries.size(), 2U);
  for (const Delivery& delivery : deliveries) {
    EXPECT_EQ(delivery.group.members, (std::vector<int>{0, 1}));
    generator->complete(delivery.worker, delivery.group.id, 2.1);
  }
  generator->meet(0, 2.2);
  generator->meet(1, 2.2);
  // The others are still to come to the call in which these two are.
  const auto alone = generator->request(2, 2.5);
  ASSERT_EQ(alone.size(), 1U);
  EXPECT_EQ(alone[0].group.members, (std::vector<int>{2}));
  generator->complete(2, alone[0].group.id, 2.5);
  generator->meet(2, 2.6);
  EXPECT_EQ(generator->request(0, 3.0).size(), 1U) << "3 has not asked since: nobody waits for anybody";
}

TEST_P(AfterAMeeting, APauseIsNone) {
  const auto generator = makeGroupGenerator(inOneHost(GetParam(), 3, 3));
  generator->pause(2, 0.0);
  generator->meet(0, 0.0);
  generator->meet(1, 0.0);
  const auto alone = generator->request(0, 1.0);
  ASSERT_EQ(alone.size(), 1U) << "2 may be waiting for it";
  generator->complete(0, alone[0].group.id, 1.0);
  generator->meet(0, 1.0);
  EXPECT_EQ(generator->meet(2, 1.0).size(), 1U);  // has come to the call out of its pause
  EXPECT_TRUE(generator->request(0, 2.0).empty());
}

TEST_P(AfterAMeeting, TheDeadAreNotAwaited) {
  const auto generator = makeGroupGenerator(inOneHost(GetParam(), 3, 3));
  allMeet(*generator, 3, 0.0);
  EXPECT_TRUE(generator->request(0, 1.0).empty());
  EXPECT_TRUE(generator->request(1, 1.0).empty());
  const auto deliveries = generator->leave(2, 1.5);
  ASSERT_EQ(deliveries.size(), 2U);
  EXPECT_EQ(deliveries[0].group.members, (std::vector<int>{0, 1}));
}

TEST_P(AfterAMeeting, GroupsOfWorkersInStepAreFull) {
  for (const int world_size : {2, 4, 8}) {
    for (const int group_size : {2, 4}) {
      if (group_size > world_size) {
        continue;
      }
      Lockstep workers(inOneHost(GetParam(), world_size, group_size), 7);
      // A draw of "random" is drawn again from fewer, where whom it names has come to the next call meanwhile.
      const std::size_t least = index(GetParam() == GeneratorKind::kRandom ? 2 : group_size);
      for (int step = 0; step < 50; ++step) {
        const auto sizes = workers.step(workers.everybody());
        ASSERT_FALSE(sizes.empty());
        EXPECT_GE(*sizes.begin(), least) << world_size << " workers, step " << step;
      }
    }
  }
}

// Whoever asks, and whoever comes to the calls without asking: all requests are answered, and once all ask again they
// find each other.
TEST_P(AfterAMeeting, NobodyWaitsForEver) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const int world_size = 2 + static_cast<int>(random.below(7));
    auto options = inOneHost(GetParam(), world_size, 2);
    options.group_size += static_cast<int>(random.below(static_cast<std::uint32_t>(world_size - 1)));
    options.sync_every = random.below(3) == 0 ? 2 : 0;
    options.seed = seed;
    Lockstep workers(options, seed);
    for (int step = 0; step < 20; ++step) {
      std::vector<int> askers = workers.everybody();
      random.shuffle(askers);
      askers.resize(random.below(static_cast<std::uint32_t>(world_size)) + 1);
      workers.step(askers);
    }
    workers.step(workers.everybody());  // in which those that did not ask are met again
    const auto sizes = workers.step(workers.everybody());
    ASSERT_FALSE(sizes.empty());
    // What is left over of ready-set's groups is one of its own.
    EXPECT_GE(*sizes.begin(), GetParam() == GeneratorKind::kReadySet ? 1U : 2U);
    if (HasFailure()) {
      return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, AfterAMeeting,
                         ::testing::Values(GeneratorKind::kRandom, GeneratorKind::kDivision, GeneratorKind::kInterIntra,
                                           GeneratorKind::kSmart, GeneratorKind::kReadySet),
                         [](const auto& parameter) {
                           std::string name = toString(parameter.param);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace torchext::core
