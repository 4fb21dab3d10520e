// PendingBuckets lets threads wait for the buckets that their tensors lie in, and ends every wait with the first error.
#include "ddp/averaging/pending_buckets.h"

#include <gtest/gtest.h>

#include <future>
#include <stdexcept>
#include <string>
#include <thread>

#include "kit/ranks_as_threads.h"

namespace torchext {
namespace {

using std::chrono::milliseconds;

// Tensors 0 and 1 lie in bucket 0, tensor 2 in bucket 1.
class PendingBucketsTest : public ::testing::Test {
 protected:
  bool over(std::vector<std::int64_t> tensors) const { return pending.over(at::IntArrayRef(tensors)); }

  PendingBuckets pending{{0, 0, 1}, 2};
};

TEST_F(PendingBucketsTest, NothingIsPendingBeforeARound) {
  EXPECT_TRUE(pending.settled());
  EXPECT_TRUE(pending.over(std::nullopt));
  pending.release(0);  // nothing happens
  EXPECT_TRUE(pending.settled());
}

TEST_F(PendingBucketsTest, ATensorIsOverWithItsBucket) {
  pending.begin();
  EXPECT_FALSE(over({0}));
  EXPECT_TRUE(over({}));
  pending.release(0);
  pending.release(0);  // counts once
  EXPECT_TRUE(over({0, 1}));
  EXPECT_FALSE(over({1, 2}));
  EXPECT_FALSE(pending.over(std::nullopt));
  EXPECT_FALSE(pending.settled());
  pending.release(1);
  EXPECT_TRUE(pending.settled());
}

TEST_F(PendingBucketsTest, AWaitEndsWithTheRelease) {
  pending.begin();
  const std::vector<std::int64_t> third{2};
  EXPECT_FALSE(pending.overWithin(milliseconds(1), at::IntArrayRef(third)));
  auto waits = std::async(std::launch::async, [&] { pending.wait(at::IntArrayRef(third)); });
  EXPECT_EQ(waits.wait_for(milliseconds(20)), std::future_status::timeout);
  pending.release(0);
  EXPECT_EQ(waits.wait_for(milliseconds(20)), std::future_status::timeout);
  pending.release(1);
  waits.get();
  EXPECT_TRUE(pending.overWithin(milliseconds(0), std::nullopt));
}

TEST_F(PendingBucketsTest, TheFirstErrorEndsEveryWaitNowAndLater) {
  pending.begin();
  auto waits = std::async(std::launch::async, [&] { pending.wait(std::nullopt); });
  pending.fail(std::make_exception_ptr(std::runtime_error("first")));
  waits.get();
  pending.fail(std::make_exception_ptr(std::runtime_error("second")));
  EXPECT_TRUE(pending.failed());
  EXPECT_FALSE(pending.settled());
  pending.wait(std::nullopt);
  EXPECT_EQ(kit::errorOf([&] { pending.rethrow(); }), "first");
  pending.releaseAll();
  EXPECT_FALSE(pending.settled());
}

TEST_F(PendingBucketsTest, ManyThreadsSeeEveryRound) {
  constexpr int kRounds = 200;
  for (int round = 0; round < kRounds; ++round) {
    pending.begin();
    std::thread averaging([&] {
      pending.release(0);
      pending.release(1);
    });
    std::thread reader([&] { pending.wait(std::nullopt); });
    pending.wait(std::nullopt);
    EXPECT_TRUE(pending.settled());
    averaging.join();
    reader.join();
  }
}

}  // namespace
}  // namespace torchext
