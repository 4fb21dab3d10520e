#include "core/fault/heartbeat.h"

#include <gtest/gtest.h>

#include <chrono>

namespace torchext::core {
namespace {

using namespace std::chrono_literals;

constexpr auto kLimit = 5000ms;
constexpr auto kInterval = 500ms;

// Ticks once an interval from `begin`, `count` times; the first alarm's tick, or -1.
int firstAlarm(SilenceWatch& watch, SilenceWatch::Time& now, int count) {
  for (int i = 1; i <= count; ++i) {
    now += kInterval;
    if (watch.tick(now)) {
      return i;
    }
  }
  return -1;
}

TEST(SilenceWatch, NobodyIsWatchedBeforeTheFirstBeat) {
  SilenceWatch watch(kLimit, kInterval);
  SilenceWatch::Time now{};
  EXPECT_EQ(firstAlarm(watch, now, 1000), -1);
}

TEST(SilenceWatch, SilenceIsSuspectAtTheLimit) {
  SilenceWatch watch(kLimit, kInterval);
  SilenceWatch::Time now{};
  watch.tick(now);
  watch.heard();
  EXPECT_EQ(firstAlarm(watch, now, 100), kLimit / kInterval);
  EXPECT_EQ(watch.tick(now += kInterval), kLimit + kInterval);  // and goes on counting
}

TEST(SilenceWatch, ABeatBeginsAnew) {
  SilenceWatch watch(kLimit, kInterval);
  SilenceWatch::Time now{};
  watch.tick(now);
  for (int round = 0; round < 1000; ++round) {  // stalls of just below the limit
    watch.heard();
    EXPECT_EQ(firstAlarm(watch, now, kLimit / kInterval - 1), -1);
  }
}

TEST(SilenceWatch, TheWatchersOwnStandstillIsNoSilenceOfThePeer) {
  SilenceWatch watch(kLimit, kInterval);
  SilenceWatch::Time now{};
  watch.tick(now);
  watch.heard();
  now += 3600s;  // this process was stopped
  EXPECT_FALSE(watch.tick(now));
  EXPECT_EQ(firstAlarm(watch, now, 100), kLimit / kInterval - 1);
}

TEST(LaggardQuery, FindsWhoIsFurthestBehind) {
  LaggardQuery query;
  query.sequence = 42;
  query.ask(0, {.started = 42});
  EXPECT_EQ(query.laggard, -1);
  query.ask(1, {.started = 41, .idle_ms = 10});
  query.ask(2, {.started = 100});
  query.ask(3, {.started = 40, .idle_ms = 20});
  query.ask(4, {.started = 40, .idle_ms = 30});  // the first one stays
  query.ask(5, {.started = 41});
  EXPECT_EQ(query.laggard, 3);
  EXPECT_EQ(query.progress.started, 40U);
  EXPECT_EQ(query.progress.idle_ms, 20U);
}

TEST(StepNotice, ALaterMeetingComesBeforeMoreSteps) {
  const StepNotice notice{.meeting = 2, .steps = 10};
  EXPECT_TRUE(notice.isAheadOf({.meeting = 2, .steps = 9}));
  EXPECT_TRUE(notice.isAheadOf({.meeting = 1, .steps = 100}));
  EXPECT_FALSE(notice.isAheadOf(notice));
  EXPECT_FALSE(notice.isAheadOf({.meeting = 2, .steps = 11}));
  EXPECT_FALSE(notice.isAheadOf({.meeting = 3, .steps = 1}));
}

}  // namespace
}  // namespace torchext::core
