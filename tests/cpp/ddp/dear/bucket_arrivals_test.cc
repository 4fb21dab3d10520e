#include "ddp/dear/bucket_arrivals.h"

#include <atomic>
#include <exception>
#include <future>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace torchext {
namespace {

using Exposed = BucketArrivals::Exposed;
using Posted = BucketArrivals::Posted;

constexpr auto kNone = BucketArrivals::kNone;

bool allGathered(const Posted& posted) { return posted.allGathered(); }

std::string errorOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "none";
}

void wait(BucketArrivals& arrivals, const BucketArrivals::Ready& ready) {
  arrivals.wait(Exposed::kNothing, ready, [] {});
}

TEST(BucketArrivals, WithoutBucketsNothingIsOnItsWay) {
  BucketArrivals arrivals;
  EXPECT_EQ(arrivals.size(), 0U);
  arrivals.reset(0, {kNone});
  EXPECT_TRUE(arrivals.quiet());
  EXPECT_FALSE(arrivals.anyPosted());
  EXPECT_TRUE(arrivals.check([](const Posted& posted) { return posted.isGathered(0) && posted.allGathered(); }));
}

TEST(BucketArrivals, ReducedInOrderStopsAtTheFirstThatHasNotArrived) {
  BucketArrivals arrivals;
  arrivals.reset(3, {0, 1, 2});
  const auto count = [&] {
    std::size_t result = 0;
    arrivals.check([&](const Posted& posted) {
      result = posted.reducedInOrder();
      return true;
    });
    return result;
  };
  EXPECT_EQ(count(), 3U);
  for (const std::size_t bucket : {0U, 1U, 2U}) {
    arrivals.reducePosted(bucket);
  }
  arrivals.reduced(1);
  EXPECT_EQ(count(), 0U);
  arrivals.reduced(0);
  EXPECT_EQ(count(), 2U);
  EXPECT_TRUE(arrivals.anyPosted());
  EXPECT_TRUE(arrivals.quiet());  // of gathers
  arrivals.reduced(2);
  EXPECT_EQ(count(), 3U);
  EXPECT_FALSE(arrivals.anyPosted());
}

TEST(BucketArrivals, ATensorIsGatheredWithItsBucket) {
  BucketArrivals arrivals;
  arrivals.reset(2, {0, kNone, 1});
  arrivals.gathersPosted();
  EXPECT_FALSE(arrivals.quiet());
  const auto gathered = [&](std::size_t tensor) {
    return arrivals.check([tensor](const Posted& posted) { return posted.isGathered(tensor); });
  };
  EXPECT_TRUE(gathered(1));
  arrivals.gathered(1);
  EXPECT_FALSE(gathered(0));
  EXPECT_TRUE(gathered(2));
  EXPECT_FALSE(arrivals.check(allGathered));
  arrivals.gathered(0);
  EXPECT_TRUE(arrivals.check(allGathered));
  EXPECT_TRUE(arrivals.quiet());
}

TEST(BucketArrivals, AWaitIsCountedAsWhatItIs) {
  BucketArrivals arrivals;
  arrivals.reset(1, {0});
  arrivals.reducePosted(0);
  std::atomic<int> late{0};
  std::thread arrives;
  // The bucket arrives once the wait has lasted long enough to look for signals.
  arrivals.wait(
      Exposed::kReduceScatter, [](const Posted& posted) { return posted.isReduced(0); },
      [&] {
        ++late;
        arrives = std::thread([&] { arrivals.reduced(0); });
      });
  arrives.join();
  EXPECT_EQ(late, 1);
  EXPECT_GE(arrivals.exposedMilliseconds(Exposed::kReduceScatter), 50);
  EXPECT_EQ(arrivals.exposedMilliseconds(Exposed::kAllGather), 0);
}

TEST(BucketArrivals, AnErrorEndsAllWaitsNowAndLater) {
  BucketArrivals arrivals;
  arrivals.reset(2, {0, 1});
  arrivals.gathersPosted();
  auto waited = std::async(std::launch::async, [&] { return errorOf([&] { wait(arrivals, &allGathered); }); });
  arrivals.fail(std::make_exception_ptr(std::runtime_error("lost")));
  EXPECT_EQ(waited.get(), "lost");
  EXPECT_TRUE(arrivals.failed());
  EXPECT_FALSE(arrivals.quiet());
  EXPECT_EQ(errorOf([&] { wait(arrivals, [](const Posted&) { return true; }); }), "lost");
  EXPECT_EQ(errorOf([&] { arrivals.check([](const Posted&) { return true; }); }), "lost");
  EXPECT_EQ(errorOf([&] { arrivals.rethrow(); }), "lost");
}

// As in training: one thread posts and waits, another has buckets arrive. What the wait returns for is there to read.
TEST(BucketArrivals, WhatHasArrivedIsThereToRead) {
  constexpr std::size_t kBuckets = 4;
  BucketArrivals arrivals;
  arrivals.reset(kBuckets, {0, 1, 2, 3});
  std::vector<int> values(kBuckets, 0);  // of the arriving thread, until the wait returns
  for (int step = 1; step <= 300; ++step) {
    arrivals.gathersPosted();
    auto arriving = std::async(std::launch::async, [&] {
      for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
        values[bucket] = step;
        arrivals.gathered(bucket);
      }
    });
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
      wait(arrivals, [bucket](const Posted& posted) { return posted.isGathered(bucket); });
      ASSERT_EQ(values[bucket], step);
    }
    arriving.get();
    ASSERT_TRUE(arrivals.quiet());
  }
}

}  // namespace
}  // namespace torchext
