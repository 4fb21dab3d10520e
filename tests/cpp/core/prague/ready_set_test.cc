// Kind ready-set: slots and their deadline, in seconds of a clock that the test holds.
#include <gtest/gtest.h>

#include <memory>
#include <optional>

#include "core/prague/group_generator.h"

namespace torchext::core {
namespace {

using Members = std::vector<int>;

std::unique_ptr<GroupGenerator> make(int world_size, int group_size, double factor, std::uint64_t sync_every = 0) {
  GeneratorOptions options;
  options.world_size = world_size;
  options.group_size = group_size;
  options.kind = GeneratorKind::kReadySet;
  options.deadline_factor = factor;
  options.sync_every = sync_every;
  return makeGroupGenerator(options);
}

void finish(GroupGenerator& generator, const std::vector<Delivery>& deliveries, double now) {
  for (const auto& delivery : deliveries) {
    generator.complete(delivery.worker, delivery.group.id, now);
  }
}

// Arrivals a second apart until the deadline is known: gaps are 1 second each, their MAD is 0.
double teachGapsOfOneSecond(GroupGenerator& generator, int world_size) {
  double now = 0;
  for (int round = 0; round < 2; ++round) {
    for (int worker = 0; worker < world_size; ++worker) {
      finish(generator, generator.request(worker, now), now);
      now += 1;
    }
  }
  return now;
}

TEST(ReadySet, AFullSlotIsTheGroup) {
  const auto generator = make(4, 2, 3);
  EXPECT_TRUE(generator->request(2, 0).empty());
  const auto deliveries = generator->request(0, 5);
  ASSERT_EQ(deliveries.size(), 2U);
  EXPECT_EQ(deliveries[0].group.members, (Members{0, 2}));
  EXPECT_EQ(deliveries[1].group.members, (Members{0, 2}));
}

TEST(ReadySet, TheDeadlineFollowsTheGaps) {
  const auto generator = make(4, 4, 0);
  EXPECT_EQ(generator->nextDeadline(), std::nullopt);
  const double start = teachGapsOfOneSecond(*generator, 4);
  EXPECT_TRUE(generator->request(3, start).empty());
  EXPECT_EQ(generator->nextDeadline(), std::nullopt);  // alone: nothing to close
  EXPECT_TRUE(generator->request(1, start + 1).empty());
  ASSERT_TRUE(generator->nextDeadline().has_value());
  EXPECT_DOUBLE_EQ(*generator->nextDeadline(), start + 3);  // three more arrivals, a second each
  EXPECT_TRUE(generator->tick(start + 2.9).empty());
  const auto deliveries = generator->tick(start + 3);
  ASSERT_EQ(deliveries.size(), 2U);
  EXPECT_EQ(deliveries[0].group.members, (Members{1, 3}));
  EXPECT_EQ(generator->nextDeadline(), std::nullopt);
}

TEST(ReadySet, SpreadOfTheGapsExtendsTheDeadline) {
  for (const double factor : {0.0, 2.0}) {
    const auto generator = make(3, 3, factor);
    double now = 0;
    for (int arrival = 0; arrival < 12; ++arrival) {
      finish(*generator, generator->request(arrival % 3, now), now);
      now += arrival < 6 ? 3 : 1;
    }
    // Six gaps of 1 and six of 3: upper median 3, and 2 of the distances 2 and 0 from it.
    EXPECT_TRUE(generator->request(0, now).empty());
    EXPECT_TRUE(generator->request(1, now + 0.5).empty());
    ASSERT_TRUE(generator->nextDeadline().has_value());
    EXPECT_DOUBLE_EQ(*generator->nextDeadline(), now + 2 * (3 + factor * 2));
  }
}

TEST(ReadySet, AWorkerAloneAtTheDeadlineIsJoinedByTheNext) {
  const auto generator = make(4, 4, 0);
  const double start = teachGapsOfOneSecond(*generator, 4);
  EXPECT_TRUE(generator->request(3, start).empty());
  EXPECT_TRUE(generator->tick(start + 10).empty());
  const auto deliveries = generator->request(1, start + 20);
  ASSERT_EQ(deliveries.size(), 2U);
  EXPECT_EQ(deliveries[0].group.members, (Members{1, 3}));
}

TEST(ReadySet, ALateTickDoesNotLetLatecomersIn) {
  const auto generator = make(4, 4, 0);
  const double start = teachGapsOfOneSecond(*generator, 4);
  generator->request(0, start);
  generator->request(1, start + 1);
  const auto deliveries = generator->request(2, start + 50);
  ASSERT_EQ(deliveries.size(), 2U);
  EXPECT_EQ(deliveries[0].group.members, (Members{0, 1}));
}

TEST(ReadySet, APauseCanFillTheSlot) {
  const auto generator = make(3, 3, 3);
  EXPECT_TRUE(generator->request(0, 0).empty());
  EXPECT_TRUE(generator->request(1, 0).empty());
  const auto deliveries = generator->pause(2, 0);
  ASSERT_EQ(deliveries.size(), 3U);  // the end mark of 2, and the group of the two others
  EXPECT_EQ(deliveries[0].worker, 2);
  EXPECT_EQ(deliveries[1].group.members, (Members{0, 1}));
}

TEST(ReadySet, EveryNthSlotIsAFullGroup) {
  const auto generator = make(4, 2, 3, 2);
  finish(*generator, generator->request(0, 0), 0);
  finish(*generator, generator->request(1, 0), 0);
  EXPECT_TRUE(generator->request(2, 1).empty());
  const auto deliveries = generator->request(3, 1);
  ASSERT_EQ(deliveries.size(), 2U);
  EXPECT_EQ(deliveries[0].group.members, (Members{0, 1, 2, 3}));
  for (const int worker : {0, 1}) {
    const auto next = generator->request(worker, 2);
    ASSERT_EQ(next.size(), 1U);
    EXPECT_EQ(next[0].group.id, deliveries[0].group.id);
  }
}

}  // namespace
}  // namespace torchext::core
