#include "kit/ranks_as_threads.h"

#include <cstdio>
#include <cstdlib>

namespace torchext::kit {
namespace {

// Below the deadline that ctest has.
constexpr seconds kDeadline{kSanitized ? 100 : 60};

std::string currentTest() {
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  return std::string(info->test_suite_name()) + "." + info->name();
}

}  // namespace

struct RanksTest::Watchdog {
  explicit Watchdog(std::string test) : name(std::move(test)), thread([this] { watch(); }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex);
      over = true;
    }
    changed.notify_all();
    thread.join();
  }

  void watch() {
    std::unique_lock lock(mutex);
    if (changed.wait_for(lock, kDeadline, [this] { return over; })) {
      return;
    }
    std::string missing;
    for (const int rank : running) {
      missing += " " + std::to_string(rank);
    }
    std::fprintf(stderr, "%s: not over after %d s; ranks that have not come back:%s\n", name.c_str(),
                 static_cast<int>(kDeadline.count()), missing.empty() ? " none" : missing.c_str());
    std::abort();
  }

  const std::string name;
  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  bool over = false;
  std::multiset<int> running;
  std::thread thread;  // last: it uses all of them
};

RanksTest::RanksTest() : watchdog_(std::make_unique<Watchdog>(currentTest())) {}
RanksTest::~RanksTest() = default;

void RanksTest::onRanks(int size, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    {
      const std::lock_guard lock(watchdog_->mutex);
      watchdog_->running.insert(rank);
    }
    threads.emplace_back([this, rank, &body] {
      const std::string error = errorOf([&] { body(rank); });
      EXPECT_EQ(error, "") << "on rank " << rank;
      const std::lock_guard lock(watchdog_->mutex);
      watchdog_->running.erase(watchdog_->running.find(rank));
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace torchext::kit
