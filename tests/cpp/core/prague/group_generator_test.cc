// The contract of group_generator.h, call by call. Random schedules are in group_generator_property_test.cc.
#include "core/prague/group_generator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>

#include "core/prague/slowdown_filter.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

using Members = std::vector<int>;

GeneratorOptions world(int world_size, int group_size, GeneratorKind kind) {
  GeneratorOptions options;
  options.world_size = world_size;
  options.group_size = group_size;
  options.kind = kind;
  return options;
}

// The group of the one delivery that a request must return at once.
Group ask(GroupGenerator& generator, int worker) {
  const auto deliveries = generator.request(worker, 0.0);
  EXPECT_EQ(deliveries.size(), 1U);
  EXPECT_EQ(deliveries.at(0).worker, worker);
  return deliveries.at(0).group;
}

void finish(GroupGenerator& generator, const Group& group) {
  for (const int member : group.members) {
    generator.complete(member, group.id, 0.0);
  }
}

TEST(GeneratorKind, NamesRoundTripAndUnknownOnesNameTheChoices) {
  for (const auto kind : {GeneratorKind::kRandom, GeneratorKind::kDivision, GeneratorKind::kInterIntra,
                          GeneratorKind::kSmart, GeneratorKind::kReadySet}) {
    EXPECT_EQ(parseGeneratorKind(toString(kind)), kind);
  }
  EXPECT_THROW_MESSAGE(parseGeneratorKind("clever"), std::invalid_argument,
                       "generator = \"clever\": allowed random, division, inter-intra, smart, ready-set");
}

TEST(GeneratorOptions, BadValuesNameValueAndRange) {
  const auto make = [](auto change) {
    GeneratorOptions options = world(4, 2, GeneratorKind::kSmart);
    change(options);
    return makeGroupGenerator(options);
  };
  EXPECT_THROW_MESSAGE(make([](auto& o) { o.world_size = 0; }), std::invalid_argument, "world_size = 0");
  EXPECT_THROW_MESSAGE(make([](auto& o) { o.group_size = 5; }), std::invalid_argument,
                       "group_size = 5: allowed 1..world_size = 1..4");
  EXPECT_THROW_MESSAGE(make([](auto& o) { o.group_size = 0; }), std::invalid_argument, "group_size = 0");
  EXPECT_THROW_MESSAGE(make([](auto& o) { o.slowdown_threshold = -1; }), std::invalid_argument,
                       "slowdown_threshold = -1");
  EXPECT_THROW_MESSAGE(make([](auto& o) { o.deadline_factor = -0.5; }), std::invalid_argument,
                       "deadline_factor = -0.5");
  EXPECT_THROW_MESSAGE(make([](auto& o) { o.deadline_factor = std::nan(""); }), std::invalid_argument,
                       "deadline_factor = nan");
  EXPECT_THROW_MESSAGE(make([](auto& o) { o.longest_wait = -1; }), std::invalid_argument, "longest_wait = -1");
  EXPECT_THROW_MESSAGE(make([](auto& o) { o.host_of = {0, 1}; }), std::invalid_argument, "size of host_of = 2");
  EXPECT_THROW_MESSAGE(make([](auto& o) { o.kind = GeneratorKind::kInterIntra; }), std::invalid_argument,
                       "size of host_of = 0");
}

class EveryKind : public ::testing::TestWithParam<GeneratorKind> {
 protected:
  static std::unique_ptr<GroupGenerator> make(int world_size, int group_size) {
    GeneratorOptions options = world(world_size, group_size, GetParam());
    options.host_of.assign(static_cast<std::size_t>(world_size), 0);
    return makeGroupGenerator(options);
  }
};

TEST_P(EveryKind, WorkersOutsideTheWorldAreRefused) {
  const auto generator = make(4, 2);
  EXPECT_THROW_MESSAGE(generator->request(4, 0), std::out_of_range, "worker = 4: allowed 0..3");
  EXPECT_THROW_MESSAGE(generator->complete(-1, 1, 0), std::out_of_range, "worker = -1");
  EXPECT_THROW_MESSAGE(generator->pause(9, 0), std::out_of_range, "worker = 9");
  EXPECT_THROW_MESSAGE(generator->meet(9, 0), std::out_of_range, "worker = 9");
  EXPECT_THROW_MESSAGE(generator->leave(9, 0), std::out_of_range, "worker = 9");
  EXPECT_THROW_MESSAGE(static_cast<void>(generator->requestCount(4)), std::out_of_range, "worker = 4");
  EXPECT_THROW_MESSAGE(generator->request(0, std::numeric_limits<double>::infinity()), std::invalid_argument,
                       "now = inf");
  EXPECT_EQ(generator->requestCount(0), 0);
}

TEST_P(EveryKind, CallsOutOfOrderAreRefusedWithNumbers) {
  const auto generator = make(1, 1);
  EXPECT_THROW_MESSAGE(generator->complete(0, 1, 0), std::logic_error, "group 1 is not under way");
  const Group group = ask(*generator, 0);
  EXPECT_THROW_MESSAGE(generator->request(0, 0), std::logic_error, "group 1 (1 under way) must be completed first");
  EXPECT_THROW_MESSAGE(generator->pause(0, 0), std::logic_error, "pause of worker 0: group 1 must be completed first");
  EXPECT_THROW_MESSAGE(generator->meet(0, 0), std::logic_error, "meet of worker 0: group 1 must be completed first");
  EXPECT_THROW_MESSAGE(generator->complete(0, 7, 0), std::logic_error,
                       "group 7 is not under way (1 under way, first 1)");
  EXPECT_EQ(generator->requestCount(0), 1);
  finish(*generator, group);
  EXPECT_EQ(ask(*generator, 0).id, 2U);
}

TEST_P(EveryKind, AloneMeansAGroupOfOne) {
  const auto generator = make(3, 2);
  generator->pause(1, 0);
  generator->leave(2, 0);
  EXPECT_EQ(ask(*generator, 0).members, (Members{0}));
}

TEST_P(EveryKind, EqualSeedsGiveEqualGroups) {
  for (int repeat = 0; repeat < 2; ++repeat) {
    const auto a = make(8, 4);
    const auto b = make(8, 4);
    for (int worker = 0; worker < 8; ++worker) {
      const auto left = a->request(worker, 0);
      const auto right = b->request(worker, 0);
      ASSERT_EQ(left.size(), right.size());
      for (std::size_t i = 0; i < left.size(); ++i) {
        EXPECT_EQ(left[i].group.members, right[i].group.members);
      }
    }
  }
}

TEST_P(EveryKind, APausedWorkerIsInNoNewGroupUntilItAsks) {
  const auto generator = make(4, 4);
  const auto end = generator->pause(2, 0);
  ASSERT_EQ(end.size(), 1U);
  EXPECT_EQ(end[0].worker, 2);
  EXPECT_EQ(end[0].group.id, 0U);
  EXPECT_EQ(generator->pause(2, 0).size(), 1U);  // harmless
  std::vector<Delivery> all;
  for (const int worker : {0, 1, 3}) {
    for (auto& delivery : generator->request(worker, 0)) {
      all.push_back(delivery);
    }
  }
  ASSERT_EQ(all.size(), 3U);
  EXPECT_EQ(all[0].group.members, (Members{0, 1, 3}));
  finish(*generator, all[0].group);
  int told = 0;
  for (const int worker : {2, 0, 1, 3}) {
    for (const auto& delivery : generator->request(worker, 0)) {
      EXPECT_EQ(delivery.group.members, (Members{0, 1, 2, 3}));
      ++told;
    }
  }
  EXPECT_EQ(told, 4);
}

TEST_P(EveryKind, AWorkerThatLeftIsRefused) {
  const auto generator = make(2, 2);
  EXPECT_TRUE(generator->leave(1, 0).empty());
  EXPECT_TRUE(generator->leave(1, 0).empty());
  EXPECT_THROW_MESSAGE(generator->request(1, 0), std::logic_error, "it left after 0 requests");
  EXPECT_THROW_MESSAGE(generator->pause(1, 0), std::logic_error, "it left");
}

INSTANTIATE_TEST_SUITE_P(Kinds, EveryKind,
                         ::testing::Values(GeneratorKind::kRandom, GeneratorKind::kDivision, GeneratorKind::kInterIntra,
                                           GeneratorKind::kSmart, GeneratorKind::kReadySet),
                         [](const auto& parameter) {
                           std::string name = toString(parameter.param);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// Division ------------------------------------------------------------------------------------------------------------

TEST(Division, TheFirstRequestDividesAllAndOthersFindTheirGroup) {
  const auto generator = makeGroupGenerator(world(8, 4, GeneratorKind::kDivision));
  std::set<Members> groups;
  std::set<std::uint64_t> ids;
  for (int worker = 0; worker < 8; ++worker) {
    const Group group = ask(*generator, worker);
    EXPECT_EQ(group.members.size(), 4U);
    groups.insert(group.members);
    ids.insert(group.id);
  }
  EXPECT_EQ(groups.size(), 2U);
  EXPECT_EQ(ids, (std::set<std::uint64_t>{1, 2}));
}

TEST(Division, TheRemainderIsSpreadAndNobodyIsAlone) {
  const auto sizes = [](int world_size, int group_size) {
    const auto generator = makeGroupGenerator(world(world_size, group_size, GeneratorKind::kDivision));
    std::map<std::uint64_t, int> by_group;
    for (int worker = 0; worker < world_size; ++worker) {
      const Group group = ask(*generator, worker);
      by_group[group.id] = static_cast<int>(group.members.size());
    }
    std::multiset<int> result;
    for (const auto& [id, size] : by_group) {
      result.insert(size);
    }
    return result;
  };
  EXPECT_EQ(sizes(7, 4), (std::multiset<int>{3, 4}));
  EXPECT_EQ(sizes(5, 4), (std::multiset<int>{5}));
  EXPECT_EQ(sizes(9, 4), (std::multiset<int>{4, 5}));
  EXPECT_EQ(sizes(3, 2), (std::multiset<int>{3}));
  EXPECT_EQ(sizes(5, 2), (std::multiset<int>{2, 3}));
  EXPECT_EQ(sizes(3, 1), (std::multiset<int>{1, 1, 1}));
}

TEST(Division, AWorkerAheadOfEverybodyIsHeldUntilSomebodyAsks) {
  GeneratorOptions options = world(3, 2, GeneratorKind::kSmart);
  options.slowdown_threshold = 2;
  const auto generator = makeGroupGenerator(options);
  // The first division takes all three; 1 and 2 never answer for it, so 0 goes on alone until it is 2 ahead, after its
  // third request: what is past counts a little less.
  Group group = ask(*generator, 0);
  EXPECT_EQ(group.members, (Members{0, 1, 2}));
  generator->complete(0, group.id, 0.0);
  group = ask(*generator, 0);
  EXPECT_EQ(group.members, (Members{0}));
  generator->complete(0, group.id, 0.0);
  EXPECT_TRUE(generator->request(0, 0.0).empty()) << "3 requests ahead: held";
  // 1 runs what is pending, then asks: the held worker joins it.
  group = ask(*generator, 1);
  EXPECT_EQ(group.members, (Members{0, 1, 2}));
  generator->complete(1, group.id, 0.0);
  const auto deliveries = generator->request(1, 0.0);
  ASSERT_EQ(deliveries.size(), 2U);
  EXPECT_EQ(deliveries[0].group.members, (Members{0, 1}));
  EXPECT_EQ(deliveries[1].group.members, (Members{0, 1}));
}

TEST(Division, AHeldWorkerIsReleasedWhenNobodyIsLeftToWaitFor) {
  GeneratorOptions options = world(2, 2, GeneratorKind::kSmart);
  options.slowdown_threshold = 2;
  const auto generator = makeGroupGenerator(options);
  const Group group = ask(*generator, 0);
  generator->complete(0, group.id, 0.0);
  EXPECT_TRUE(generator->request(0, 0.0).empty());
  const auto drained = generator->pause(1, 0.0);
  ASSERT_EQ(drained.size(), 3U) << "its pending group, the end of the drain, and the held worker's";
  EXPECT_EQ(drained[2].worker, 0);
  EXPECT_EQ(drained[2].group.members, (Members{0}));
}

TEST(Division, WhoeverIsStillAveragingIsBetterThanNobody) {
  const auto generator = makeGroupGenerator(world(4, 2, GeneratorKind::kDivision));
  const Group first = ask(*generator, 0);
  const int partner = first.members[0] == 0 ? first.members[1] : first.members[0];
  ask(*generator, partner);
  generator->complete(0, first.id, 0);
  // partner is still in the first group, the two others have one pending.
  const Group second = ask(*generator, 0);
  EXPECT_EQ(second.members, first.members);
  generator->complete(0, second.id, 0);
  // Now partner has one pending as well: 0 goes on alone rather than wait.
  EXPECT_EQ(ask(*generator, 0).members, (Members{0}));
}

TEST(Division, NobodyWaitsForAGroupThatWaitsForAMember) {
  auto options = world(3, 3, GeneratorKind::kDivision);
  const auto generator = makeGroupGenerator(options);
  generator->pause(2, 0);
  const Group pair = ask(*generator, 0);  // 1 has not come to it
  EXPECT_EQ(pair.members, (Members{0, 1}));
  EXPECT_EQ(ask(*generator, 2).members, (Members{2}));
}

TEST(Division, WhoeverIsStillAveragingIsLeftOutWhereOthersAreIdle) {
  const auto generator = makeGroupGenerator(world(5, 2, GeneratorKind::kDivision));
  const Group first = ask(*generator, 0);
  const auto busy = std::find_if(first.members.begin(), first.members.end(), [](int member) { return member != 0; });
  for (int worker = 1; worker < 5; ++worker) {
    const Group group = ask(*generator, worker);
    if (worker != *busy) {
      generator->complete(worker, group.id, 0);
    }
  }
  generator->complete(0, first.id, 0);
  const Group second = ask(*generator, 0);
  EXPECT_GT(second.members.size(), 1U);
  EXPECT_EQ(std::count(second.members.begin(), second.members.end(), *busy), 0);
}

TEST(Division, EveryNthIsAFullOneOverPendingGroupsToo) {
  auto options = world(6, 2, GeneratorKind::kDivision);
  options.sync_every = 2;
  const auto generator = makeGroupGenerator(options);
  const Group first = ask(*generator, 0);
  for (const int member : first.members) {
    if (member != 0) {
      ask(*generator, member);
    }
  }
  finish(*generator, first);
  const Group full = ask(*generator, 0);
  EXPECT_EQ(full.members, (Members{0, 1, 2, 3, 4, 5}));
  // The others still have the first division before it.
  for (int worker = 1; worker < 6; ++worker) {
    Group next = ask(*generator, worker);
    if (next.id != full.id) {
      EXPECT_LT(next.id, full.id);
      generator->complete(worker, next.id, 0);
      next = ask(*generator, worker);
    }
    EXPECT_EQ(next.id, full.id);
  }
}

TEST(Division, APauseDrainsPendingGroupsInOrder) {
  auto options = world(4, 4, GeneratorKind::kInterIntra);
  options.host_of = {0, 0, 1, 1};
  const auto generator = makeGroupGenerator(options);
  ask(*generator, 0);
  const auto drain = generator->pause(3, 0);
  ASSERT_EQ(drain.size(), 3U);
  EXPECT_LT(drain[0].group.id, drain[1].group.id);
  EXPECT_EQ(drain[2].group.id, 0U);
  EXPECT_THROW_MESSAGE(generator->request(3, 0), std::logic_error, "(2 under way)");
  generator->complete(3, drain[0].group.id, 0);
  generator->complete(3, drain[1].group.id, 0);
  EXPECT_EQ(ask(*generator, 3).members, (Members{3}));
}

// Inter-intra ---------------------------------------------------------------------------------------------------------

TEST(InterIntra, TwoRoundsWithOneHeadAHost) {
  auto options = world(8, 2, GeneratorKind::kInterIntra);
  options.host_of = {0, 0, 0, 0, 1, 1, 1, 1};
  const auto generator = makeGroupGenerator(options);
  std::vector<Members> heads;
  for (int division = 0; division < 5; ++division) {
    std::set<Members> rounds[2];
    for (auto& groups : rounds) {
      std::set<std::uint64_t> ids;
      std::vector<Group> distinct;
      for (int worker = 0; worker < 8; ++worker) {
        const Group group = ask(*generator, worker);
        if (ids.insert(group.id).second) {
          distinct.push_back(group);
          groups.insert(group.members);
        }
      }
      for (const auto& group : distinct) {
        finish(*generator, group);
      }
    }
    ASSERT_EQ(rounds[0].size(), 3U);  // the two heads, and three others of each host
    for (const auto& members : rounds[0]) {
      if (members.size() == 2) {
        heads.push_back(members);
      }
    }
    EXPECT_EQ(rounds[1], (std::set<Members>{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  }
  EXPECT_EQ(heads, (std::vector<Members>{{0, 4}, {1, 5}, {2, 6}, {3, 7}, {0, 4}}));
}

// The groups of a round in which each worker asks once and finishes.
std::set<Members> roundOf(GroupGenerator& generator, int workers) {
  std::set<Members> members;
  std::vector<Group> distinct;
  for (int worker = 0; worker < workers; ++worker) {
    const Group group = ask(generator, worker);
    if (members.insert(group.members).second) {
      distinct.push_back(group);
    }
  }
  for (const auto& group : distinct) {
    finish(generator, group);
  }
  return members;
}

TEST(Smart, OfRacksOnlyTheHeadsMeetAcross) {
  auto options = world(12, 3, GeneratorKind::kSmart);
  for (int worker = 0; worker < 12; ++worker) {
    options.host_of.push_back(worker);
    options.rack_of.push_back(worker / 6);
  }
  const auto generator = makeGroupGenerator(options);
  for (int division = 0; division < 6; ++division) {
    const auto across = roundOf(*generator, 12);
    ASSERT_TRUE(across.contains({division, 6 + division}));
    EXPECT_EQ(across.size(), 5U) << "five others of each rack make a group of two and one of three";
    const auto inside = roundOf(*generator, 12);
    EXPECT_EQ(inside.size(), 4U) << "groups of three";
    for (const auto& members : inside) {
      EXPECT_EQ(members.size(), 3U);
      EXPECT_EQ(members.front() / 6, members.back() / 6);
    }
  }
}

TEST(Smart, RacksOfOtherSizesAreRefused) {
  auto options = world(4, 2, GeneratorKind::kSmart);
  options.rack_of = {0, 1};
  EXPECT_THROW_MESSAGE(makeGroupGenerator(options), std::invalid_argument, "size of host_of = 2");
}

TEST(InterIntra, OneHostIsAPlainDivision) {
  auto options = world(4, 2, GeneratorKind::kInterIntra);
  options.host_of = {0, 0, 0, 0};
  const auto generator = makeGroupGenerator(options);
  EXPECT_EQ(ask(*generator, 0).members.size(), 2U);
  options.host_of = {0, 0, 1, 1};
  const auto two_hosts = makeGroupGenerator(options);
  two_hosts->pause(2, 0);
  two_hosts->pause(3, 0);
  EXPECT_EQ(ask(*two_hosts, 0).members, (Members{0, 1}));
}

// Slowdown filter -----------------------------------------------------------------------------------------------------

// Four workers in pairs. Workers 0 and 1 are `ahead` requests ahead of `slow` and `partner`; all are idle.
struct TwoSpeeds {
  std::unique_ptr<GroupGenerator> generator;
  int slow = -1;
  int partner = -1;
  int fast = -1;
  int other = -1;
};

TwoSpeeds runAhead(const GeneratorOptions& options, int ahead) {
  TwoSpeeds result{makeGroupGenerator(options)};
  const Group pair = ask(*result.generator, 0);
  Members rest;
  for (int worker = 0; worker < 4; ++worker) {
    if (std::count(pair.members.begin(), pair.members.end(), worker) == 0) {
      rest.push_back(worker);
    }
  }
  result.fast = 0;
  result.other = pair.members[1];
  result.slow = rest[0];
  result.partner = rest[1];
  ask(*result.generator, result.other);
  finish(*result.generator, pair);
  for (int i = 0; i < ahead; ++i) {
    const Group again = ask(*result.generator, result.fast);
    EXPECT_EQ(again.members, pair.members);
    ask(*result.generator, result.other);
    finish(*result.generator, again);
  }
  const Group slow_pair = ask(*result.generator, result.slow);
  ask(*result.generator, result.partner);
  finish(*result.generator, slow_pair);
  EXPECT_EQ(result.generator->requestCount(result.fast) - result.generator->requestCount(result.slow), ahead);
  return result;
}

TEST(SlowdownFilter, AWorkerBehindIsInNobodyElsesDivision) {
  auto options = world(4, 2, GeneratorKind::kSmart);
  options.slowdown_threshold = 4;
  const auto behind = runAhead(options, 4);  // 4 behind, 5 with the request that asks: less what has faded, over 4
  EXPECT_EQ(ask(*behind.generator, behind.fast).members, (Members{behind.fast, behind.other}));
  const auto close = runAhead(options, 2);
  ask(*close.generator, close.fast);
  const Group pending = ask(*close.generator, close.slow);
  EXPECT_EQ(pending.id, 5U) << "one division of all four makes groups 5 and 6, or the slow one is in the fast one's";
}

TEST(SlowdownFilter, ASlowWorkersOwnRequestTakesFastOnesButNoOtherSlowOne) {
  auto options = world(4, 2, GeneratorKind::kSmart);
  options.slowdown_threshold = 3;
  const auto both = runAhead(options, 5);
  const Group own = ask(*both.generator, both.slow);
  Members expected{both.slow, both.fast, both.other};
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(own.members, expected);
}

TEST(SlowdownFilter, APauseDoesNotCountAsFallingBehind) {
  auto options = world(3, 3, GeneratorKind::kSmart);
  options.slowdown_threshold = 2;
  const auto generator = makeGroupGenerator(options);
  generator->pause(2, 0);
  const auto together = [&](int workers) {
    Group group;
    for (int worker = 0; worker < workers; ++worker) {
      group = ask(*generator, worker);
    }
    finish(*generator, group);
    return group.members;
  };
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(together(2), (Members{0, 1}));
  }
  generator->complete(2, ask(*generator, 2).id, 0);
  EXPECT_EQ(generator->requestCount(2), 1);
}

TEST(SlowdownFilter, WorkersThatPauseTogetherInEveryStepStayEqual) {
  constexpr int kWorkers = 8;
  SlowdownFilter filter(kWorkers, 4);
  const Members all{0, 1, 2, 3, 4, 5, 6, 7};
  for (int step = 0; step < 100; ++step) {
    for (int worker = kWorkers - 1; worker >= 0; --worker) {
      filter.onPause(worker);
    }
    for (int worker = kWorkers - 1; worker >= 0; --worker) {
      filter.onReturn(worker);
      filter.onRequest(worker, step);
    }
    for (const int initiator : all) {
      const auto reference = filter.reference(initiator, all);
      EXPECT_TRUE(std::none_of(all.begin(), all.end(), [&](int other) { return filter.late(reference, other); }))
          << "step " << step << ", request of " << initiator;
    }
  }
}

// Random --------------------------------------------------------------------------------------------------------------

TEST(RandomGroups, AWorkerInAnUnfinishedGroupIsInNoOther) {
  auto options = world(3, 2, GeneratorKind::kRandom);
  const auto generator = makeGroupGenerator(options);
  const Group first = ask(*generator, 0);
  const int partner = first.members[1];
  const int third = 3 - partner;
  EXPECT_TRUE(generator->request(third, 0).empty());  // both it could draw are locked
  ask(*generator, partner);
  generator->complete(0, first.id, 0);
  // One of the two is free now: the waiting draw gets it, or waits for the other one.
  const auto deliveries = generator->complete(partner, first.id, 0);
  EXPECT_EQ(generator->requestCount(third), 1);
  EXPECT_LE(deliveries.size(), 1U);
}

TEST(RandomGroups, AWaitingDrawThatNamesAPausedWorkerIsDrawnAgain) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    auto options = world(3, 2, GeneratorKind::kRandom);
    options.seed = seed;
    for (const bool dies : {false, true}) {
      const auto generator = makeGroupGenerator(options);
      const Group first = ask(*generator, 0);
      const int partner = first.members[1];
      const int third = 3 - partner;
      ASSERT_TRUE(generator->request(third, 0).empty());
      // Both possible partners of third go: it must not wait for either of them.
      std::vector<Delivery> told;
      const auto take = [&](const std::vector<Delivery>& deliveries) {
        for (const auto& delivery : deliveries) {
          if (delivery.worker == third) {
            told.push_back(delivery);
          }
        }
      };
      take(generator->complete(0, first.id, 0));
      for (const int gone : {0, partner}) {
        if (gone == partner && !dies) {
          // It still has the group to run before it can be away.
          take(generator->pause(gone, 0));
          take(generator->complete(gone, first.id, 0));
        } else {
          take(dies ? generator->leave(gone, 0) : generator->pause(gone, 0));
        }
      }
      ASSERT_EQ(told.size(), 1U) << "seed " << seed;
      EXPECT_NE(told[0].group.members, first.members);
    }
  }
}

TEST(RandomGroups, NobodyOvertakesAFullGroup) {
  auto options = world(3, 1, GeneratorKind::kRandom);
  options.sync_every = 2;
  const auto generator = makeGroupGenerator(options);
  const Group alone = ask(*generator, 0);
  EXPECT_TRUE(generator->request(1, 0).empty());  // the second draw: all, and 0 is locked
  EXPECT_TRUE(generator->request(2, 0).empty());  // a draw of 2 alone would delay it
  const auto deliveries = generator->complete(0, alone.id, 0);
  ASSERT_EQ(deliveries.size(), 2U);
  EXPECT_EQ(deliveries[0].group.members, (Members{0, 1, 2}));
}

// Leaving -------------------------------------------------------------------------------------------------------------

TEST(Leave, GroupsNobodyKnowsLoseTheWorkerKnownOnesKeepIt) {
  const auto generator = makeGroupGenerator(world(4, 2, GeneratorKind::kDivision));
  const Group known = ask(*generator, 0);
  const int partner = known.members[1];
  Members unknown;
  for (int worker = 1; worker < 4; ++worker) {
    if (worker != partner) {
      unknown.push_back(worker);
    }
  }
  generator->leave(unknown[0], 0);
  EXPECT_EQ(ask(*generator, unknown[1]).members, (Members{unknown[1]}));
  generator->leave(0, 0);
  EXPECT_EQ(ask(*generator, partner).members, known.members);  // the same members for all: it fails there, then goes on
  generator->complete(partner, known.id, 0);
  EXPECT_EQ(ask(*generator, partner).members, (Members{std::min(partner, unknown[1]), std::max(partner, unknown[1])}));
}

}  // namespace
}  // namespace torchext::core
