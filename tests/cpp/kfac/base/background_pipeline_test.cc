#include "kfac/base/background_pipeline.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace torchext {
namespace {

using Runs = BackgroundPipeline<std::string>;

std::string get(Runs& runs, std::size_t key) {
  return runs.use(key, [](const std::string& result) { return result; });
}

std::string errorOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "none";
}

class BackgroundPipelineTest : public testing::Test {
 protected:
  BackgroundPipelineTest() : thread_([this] { runs_.work(); }) {}
  ~BackgroundPipelineTest() override {
    runs_.close();
    thread_.join();
  }
  // Comes when the promise that it returns is kept.
  std::shared_ptr<std::promise<void>> follow(std::vector<std::size_t> keys) {
    auto come = std::make_shared<std::promise<void>>();
    runs_.follow({[come] { come->get_future().get(); }, std::move(keys),
                  [this](std::size_t key) {
                    order_.push_back(key);  // of the one thread; read when it is at rest
                    return "result " + std::to_string(key);
                  }});
    return come;
  }

  Runs runs_;
  std::vector<std::size_t> order_;
  std::thread thread_;
};

TEST_F(BackgroundPipelineTest, ResultsAreMadeInOrderOnceTheRunHasCome) {
  follow({4, 3, 1})->set_value();
  EXPECT_EQ(get(runs_, 1), "result 1");
  EXPECT_EQ(get(runs_, 4), "result 4");
  EXPECT_EQ(get(runs_, 4), "result 4");  // it stays
  runs_.end();
  EXPECT_EQ(order_, (std::vector<std::size_t>{4, 3, 1}));
}

TEST_F(BackgroundPipelineTest, AResultCanBeChangedWhereItIsUsed) {
  follow({0})->set_value();
  runs_.use(0, [](std::string& result) { result += ", used"; });
  EXPECT_EQ(get(runs_, 0), "result 0, used");
  runs_.end();
}

TEST_F(BackgroundPipelineTest, ARunThatIsLostIsThrownWhereItIsNeeded) {
  follow({0, 1})->set_exception(std::make_exception_ptr(std::runtime_error("the peer is gone")));
  EXPECT_EQ(errorOf([&] { get(runs_, 1); }), "the peer is gone");
  EXPECT_EQ(errorOf([&] { get(runs_, 0); }), "the peer is gone");
  runs_.end();
  EXPECT_TRUE(order_.empty());

  follow({7})->set_value();  // the next step knows nothing of it
  EXPECT_EQ(get(runs_, 7), "result 7");
  runs_.end();
}

TEST_F(BackgroundPipelineTest, AResultThatCannotBeMadeIsThrownAndSoIsWhatFollows) {
  runs_.follow(
      {[] {},
       {0, 1, 2},
       [](std::size_t key) { return key == 1 ? throw std::runtime_error("not that one") : std::to_string(key); }});
  EXPECT_EQ(get(runs_, 0), "0");
  EXPECT_EQ(errorOf([&] { get(runs_, 1); }), "not that one");
  EXPECT_EQ(errorOf([&] { get(runs_, 2); }), "not that one");
  runs_.end();
}

TEST_F(BackgroundPipelineTest, NothingIsMadeOfARunThatComesAfterTheStepsEnd) {
  const auto late = follow({0});
  auto ended = std::async(std::launch::async, [&] { runs_.end(); });
  EXPECT_EQ(ended.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  late->set_value();
  ended.get();
  EXPECT_TRUE(order_.empty());
}

TEST(BackgroundPipeline, CloseEndsTheThreadWithTheWaitItIsIn) {
  Runs runs;
  std::promise<void> come;
  std::atomic<bool> waits = false;
  std::atomic<int> made = 0;
  runs.follow({[&] {
                 waits = true;
                 come.get_future().get();
               },
               {0},
               [&](std::size_t) {
                 ++made;
                 return std::string();
               }});
  std::thread thread([&] { runs.work(); });
  while (!waits) {
    std::this_thread::yield();
  }
  runs.close();
  come.set_value();
  thread.join();
  EXPECT_EQ(made, 0);
}

// What a run holds is gone when end() returns: buffers may be given back then.
TEST_F(BackgroundPipelineTest, ARunIsDroppedBeforeTheStepEnds) {
  auto held = std::make_shared<int>(1);
  runs_.follow({[held] {}, {0}, [held](std::size_t) { return std::string("made"); }});
  EXPECT_EQ(get(runs_, 0), "made");
  runs_.end();
  EXPECT_EQ(held.use_count(), 1);
}

// A handler of signals that raises leaves the wait; what was waited for goes on.
TEST_F(BackgroundPipelineTest, AWaitCanBeInterrupted) {
  const auto come = follow({0});
  setSignalChecker([] { throw std::runtime_error("interrupted"); });
  EXPECT_EQ(errorOf([&] { get(runs_, 0); }), "interrupted");
  setSignalChecker(nullptr);
  come->set_value();
  EXPECT_EQ(get(runs_, 0), "result 0");
  runs_.end();
}

// Steps that are used, partly used or left out, with a run that comes at any time: results are those of their own step,
// and what they are made of is written only while the thread is at rest.
TEST(BackgroundPipeline, RandomSteps) {
  Runs runs;
  std::thread thread([&] { runs.work(); });
  std::mt19937 random(1);
  std::vector<int> memory(64);  // unguarded, as factors are
  for (int step = 0; step < 400; ++step) {
    for (int& value : memory) {
      value = step;
    }
    const std::size_t count = 1 + random() % 8;
    const auto come = std::make_shared<std::promise<void>>();
    std::vector<std::size_t> keys(count);
    std::iota(keys.begin(), keys.end(), std::size_t{0});
    runs.follow({[come] { come->get_future().get(); }, std::move(keys),
                 [&memory](std::size_t key) { return std::to_string(memory[key]) + ":" + std::to_string(key); }});
    std::thread network([come, early = random() % 2 == 0] {
      if (!early) {
        std::this_thread::yield();
      }
      come->set_value();
    });
    const std::size_t used = random() % (count + 1);
    for (std::size_t key = 0; key < used; ++key) {
      EXPECT_EQ(get(runs, key), std::to_string(step) + ":" + std::to_string(key));
    }
    runs.end();
    network.join();
  }
  runs.close();
  thread.join();
}

}  // namespace
}  // namespace torchext
