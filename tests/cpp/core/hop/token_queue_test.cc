#include "core/hop/token_queue.h"

#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>

#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

TEST(TokenQueue, SizeIsTheGapAndTheLead) {
  TokenQueue queue(3, 2);
  EXPECT_EQ(queue.size(), 3);
  EXPECT_EQ(queue.capacity(), 9);
  EXPECT_EQ(queue.lag(), 0);
  queue.take();  // the consumer enters iteration 1, 2, 3
  queue.take();
  queue.take();
  EXPECT_EQ(queue.lag(), -3);
  EXPECT_FALSE(queue.canTake());  // and is max_ig ahead
  queue.give(5);
  EXPECT_EQ(queue.lag(), 2);
  EXPECT_TRUE(queue.canTake(5));
  EXPECT_FALSE(queue.canTake(6));
  queue.take(2);  // a jump
  EXPECT_EQ(queue.size(), 3);
}

TEST(TokenQueue, ReleasedQueuesHoldNobodyBack) {
  TokenQueue queue(1, 1);
  queue.take();
  queue.release();
  EXPECT_TRUE(queue.released());
  EXPECT_TRUE(queue.canTake(100));
  EXPECT_NO_THROW(queue.take(100));
  EXPECT_NO_THROW(queue.give(100));  // tokens that were under way
  EXPECT_EQ(queue.size(), 0);
}

TEST(TokenQueue, MisuseIsNamed) {
  TokenQueue queue(2, 1);
  EXPECT_THROW_MESSAGE(queue.take(3), std::logic_error, "3 tokens taken, but there are 2");
  EXPECT_THROW_MESSAGE(queue.give(3), std::logic_error, "3 tokens given, but only 2 of 4 fit");
  EXPECT_EQ(queue.size(), 2);
  EXPECT_THROW_MESSAGE(queue.give(0), std::invalid_argument, "count of tokens = 0: allowed 1 or more");
  EXPECT_THROW_MESSAGE(queue.take(-1), std::invalid_argument, "count of tokens = -1");
  EXPECT_THROW_MESSAGE(TokenQueue(0, 1), std::invalid_argument, "max_iteration_gap = 0: allowed 1 or more");
  EXPECT_THROW_MESSAGE(TokenQueue(1, 0), std::invalid_argument, "path_length = 0: allowed 1 or more");
  EXPECT_THROW_MESSAGE(TokenQueue(std::numeric_limits<int>::max(), 1), std::invalid_argument, "path_length is 1");
}

}  // namespace
}  // namespace torchext::core
