#include "core/prague/step_pace.h"

#include <gtest/gtest.h>

namespace torchext::core {
namespace {

using std::chrono::milliseconds;

class StepPaceTest : public ::testing::Test {
 protected:
  void stepAfter(milliseconds span) { pace_.stepped(now_ += span); }

  StepPace pace_;
  StepPace::Time now_{};
};

TEST_F(StepPaceTest, NothingIsKnownBeforeTheSecondStep) {
  EXPECT_EQ(pace_.patience(), StepPace::kUnknown);
  stepAfter(milliseconds(10));
  EXPECT_EQ(pace_.patience(), StepPace::kUnknown);
}

TEST_F(StepPaceTest, ThreeStepsAndNotLessThanTheLeast) {
  stepAfter(milliseconds(0));
  stepAfter(milliseconds(10));
  EXPECT_EQ(pace_.patience(), StepPace::kLeast);
  stepAfter(milliseconds(400));
  EXPECT_EQ(pace_.patience(), milliseconds(1200));
}

TEST_F(StepPaceTest, TheLongestOfLateCounts) {
  stepAfter(milliseconds(0));
  stepAfter(milliseconds(600));
  stepAfter(milliseconds(100));
  EXPECT_EQ(pace_.patience(), milliseconds(3 * 540));
  for (int i = 0; i < 60; ++i) {
    stepAfter(milliseconds(200));
  }
  EXPECT_EQ(pace_.patience(), milliseconds(600));
}

TEST_F(StepPaceTest, ALongPauseIsNoPatienceForHours) {
  stepAfter(milliseconds(0));
  stepAfter(std::chrono::hours(3));
  EXPECT_EQ(pace_.patience(), std::chrono::minutes(5));
}

}  // namespace
}  // namespace torchext::core
