#include "c10d/threads/interruptible_task.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>

#include "c10d/threads/interruptible_wait.h"

namespace torchext {
namespace {

// What a signal's handler of Python's would raise.
struct Interrupt : std::runtime_error {
  Interrupt() : std::runtime_error("interrupted") {}
};

std::atomic<bool> interrupted{false};

void raiseInterrupt() {
  if (interrupted) {
    throw Interrupt();
  }
}

class InterruptibleTaskTest : public ::testing::Test {
 protected:
  InterruptibleTaskTest() {
    interrupted = false;
    setSignalChecker(&raiseInterrupt);
  }
  ~InterruptibleTaskTest() override {
    setSignalChecker([] {});
  }
};

TEST_F(InterruptibleTaskTest, ReturnsWhenTheBodyHas) {
  const auto value = std::make_shared<int>(0);
  runInterruptibly(
      "test", [value] { *value = 3; }, [] { FAIL(); });
  EXPECT_EQ(*value, 3);
}

TEST_F(InterruptibleTaskTest, ThrowsWhatTheBodyThrows) {
  const auto call = [] {
    runInterruptibly(
        "test", [] { throw std::logic_error("body"); }, [] { FAIL(); });
  };
  EXPECT_THROW(call(), std::logic_error);
}

TEST_F(InterruptibleTaskTest, CancelsTheBodyWhereASignalRaises) {
  interrupted = true;
  const auto over = std::make_shared<std::promise<void>>();
  const auto ended = std::make_shared<std::atomic<bool>>(false);
  const auto call = [&] {
    runInterruptibly(
        "test",
        [over, ended] {
          over->get_future().wait();
          *ended = true;
        },
        [&] { over->set_value(); });
  };
  EXPECT_THROW(call(), Interrupt);
  EXPECT_TRUE(*ended);
}

TEST_F(InterruptibleTaskTest, LeavesABodyThatGoesOnToItself) {
  interrupted = true;
  const auto over = std::make_shared<std::promise<void>>();
  const auto call = [&] {
    runInterruptibly(
        "test", [over] { over->get_future().wait(); }, [] {});
  };
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THROW(call(), Interrupt);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  over->set_value();
}

}  // namespace
}  // namespace torchext
