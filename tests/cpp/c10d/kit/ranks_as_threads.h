// RanksTest runs the ranks of a group as threads of one process, over a FakeNetwork and a HashStore.
//
// Every test has a deadline: a watchdog names the test, says which ranks have not come back, and ends the process.
#pragma once

#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "c10d/backend/delegating_backend.h"
#include "c10d/backend/living_backends.h"
#include "kit/error_text.h"
#include "kit/fake_network.h"

namespace torchext::kit {

using std::chrono::milliseconds;
using std::chrono::seconds;

#ifdef TORCHEXT_SANITIZED
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// What a wait may last that is to end at once, on a machine that does other work, too.
inline constexpr milliseconds kSoon{kSanitized ? 15000 : 8000};

// One job: its networks and its store.
struct World {
  explicit World(int ranks, milliseconds timeout = seconds(60))
      : size(ranks),
        data(std::make_shared<FakeNetwork>(ranks, timeout)),
        control(std::make_shared<FakeNetwork>(ranks)),
        store(c10::make_intrusive<c10d::HashStore>()) {}

  InnerBackends inner(int rank) const {
    return {.cpu = data->connect(rank), .cuda = nullptr, .control = size > 1 ? control->connect(rank) : nullptr};
  }
  // The process of a rank ends: all its connections close.
  void kill(int rank) const {
    data->close(rank);
    control->close(rank);
  }
  // A rank is stopped, or its host is cut off: nothing closes.
  void freeze(int rank) const {
    data->freeze(rank);
    control->freeze(rank);
  }
  void thaw(int rank) const {
    data->thaw(rank);
    control->thaw(rank);
  }

  const int size;
  const std::shared_ptr<FakeNetwork> data;
  const std::shared_ptr<FakeNetwork> control;
  const c10::intrusive_ptr<c10d::HashStore> store;
};

// Whether `done` becomes true soon.
inline bool soon(const std::function<bool()>& done, milliseconds limit = kSoon) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) {
      return false;
    }
    std::this_thread::sleep_for(milliseconds(2));
  }
  return true;
}

class RanksTest : public ::testing::Test {
 protected:
  RanksTest();
  ~RanksTest() override;

  // Runs body(rank) on a thread for each rank, until all have returned. What one throws fails the test.
  void onRanks(int size, const std::function<void(int rank)>& body);

  // body(group, rank) with what `make` makes on each rank, then shutdown. Nobody's connections close before all bodies
  // are over: that would tell the others what the code under test must tell them.
  template <class Make, class Body>
  void onMade(int size, const Make& make, const Body& body) {
    std::barrier<> over(size);
    onRanks(size, [&](int rank) { runRank(over, make, body, rank); });
  }
  // A group of this class on each rank of a world.
  template <class Group, class Options, class Body>
  void onGroups(const World& world, const Options& options, const Body& body) {
    onMade(
        world.size,
        [&](int rank) {
          return makeBackend<Group>(rank, world.size, world.inner(rank), c10::make_intrusive<Options>(options));
        },
        body);
  }
  // The same of the class that all backends of ours derive from.
  template <class Body>
  void onPlainGroups(const World& world, const GroupOptions& options, const Body& body) {
    onMade(
        world.size, [&](int rank) { return plainGroup(world, rank, options); }, body);
  }

  static c10::intrusive_ptr<DelegatingBackend> plainGroup(const World& world, int rank, const GroupOptions& options) {
    return makeBackend<DelegatingBackend>(rank, world.size, "prague", world.inner(rank),
                                          c10::make_intrusive<GroupOptions>(options));
  }
  // One rank of onMade().
  template <class Make, class Body>
  static void runRank(std::barrier<>& over, const Make& make, const Body& body, int rank) {
    decltype(make(rank)) group;
    const std::string error = errorOf([&] {
      group = make(rank);
      body(*group, rank);
    });
    EXPECT_EQ(error, "") << "on rank " << rank;
    over.arrive_and_wait();
    if (group) {
      group->shutdown();
    }
  }

 private:
  struct Watchdog;
  std::unique_ptr<Watchdog> watchdog_;
};

}  // namespace torchext::kit
