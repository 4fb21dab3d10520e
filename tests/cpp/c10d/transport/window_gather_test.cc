// SharedWindows finds ranks that share memory; WindowGather exchanges and adds their parts through it.
#include "c10d/transport/window_gather.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstring>
#include <numeric>
#include <random>

#include <ATen/ATen.h>

#include "c10d/backend/attachable_backend.h"
#include "kit/ranks_as_threads.h"

namespace torchext {
namespace {

using kit::errorOf;
using kit::has;
using kit::World;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kWindowTag = 300;

class WindowGatherTest : public kit::RanksTest {
 protected:
  // body(gather, rank, group) with the memory of all ranks of a group shared.
  template <class Body>
  void onWindows(const World& world, const Body& body, seconds timeout = seconds(30)) {
    GroupOptions options("prague", timeout);
    options.heartbeat_timeout = milliseconds(0);
    onRanks(world.size, [&](int rank) {
      const auto group = makeBackend<AttachableBackend>(rank, world.size, "prague", world.inner(rank),
                                                        c10::make_intrusive<GroupOptions>(options));
      auto windows = group->shareMemory(kWindowTag, true);
      ASSERT_TRUE(windows);
      {
        WindowGather gather(std::move(windows), group->dataTransport(), "a gather");
        body(gather, rank, *group);
      }
      group->shutdown();
    });
  }
};

using Bytes = std::vector<std::byte>;

Bytes randomBytes(std::size_t size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(size);
  for (std::byte& byte : bytes) {
    byte = static_cast<std::byte>(random());
  }
  return bytes;
}

WindowGather::Part partOf(Bytes& bytes) { return {bytes.data(), bytes.size()}; }

TEST_F(WindowGatherTest, RanksFindTheirPartners) {
  constexpr int kRanks = 4;
  for (int without = 0; without <= kRanks; ++without) {  // which rank shares nothing; the last time none
    const World world(kRanks);
    GroupOptions options("prague", seconds(30));
    onRanks(kRanks, [&](int rank) {
      const auto group = makeBackend<AttachableBackend>(rank, kRanks, "prague", world.inner(rank),
                                                        c10::make_intrusive<GroupOptions>(options));
      const auto windows = group->shareMemory(kWindowTag, rank != without);
      ASSERT_EQ(windows != nullptr, rank != without);
      if (windows) {
        std::vector<int> expected;
        for (int other = 0; other < kRanks; ++other) {
          if (other != without) {
            expected.push_back(other);
          }
        }
        EXPECT_EQ(windows->partners(), expected);
        EXPECT_TRUE(windows->cover(expected));
        EXPECT_TRUE(windows->cover({rank}));
        EXPECT_EQ(windows->cover({0, 1, 2, 3}), without == kRanks);
      }
      group->shutdown();
    });
    EXPECT_EQ(world.data->pending(), 0U);
  }
}

TEST_F(WindowGatherTest, RefusesAMalformedAddress) {
  const World world(2);
  std::barrier<> end(2);
  onRanks(2, [&](int rank) {
    const InnerBackends inner = world.inner(rank);
    if (rank == 1) {
      std::vector<at::Tensor> junk{at::full({56}, 9, at::kByte)};
      std::vector<at::Tensor> answer{at::zeros({56}, at::kByte)};
      const auto receive = inner.cpu->recv(answer, 0, kWindowTag);
      inner.cpu->send(junk, 0, kWindowTag)->wait();
      end.arrive_and_wait();
      return;
    }
    const auto group = makeBackend<AttachableBackend>(
        rank, 2, "prague", inner, c10::make_intrusive<GroupOptions>("prague", milliseconds(30'000)));
    const std::string error = errorOf([&] { group->shareMemory(kWindowTag, true); });
    EXPECT_TRUE(has(error, "rank 1 sent a malformed message")) << error;
    end.arrive_and_wait();
    group->shutdown();
  });
}

// Parts of any sizes, several pieces and none among them; every rank ends with every part.
TEST_F(WindowGatherTest, GathersPartsOfAnySizes) {
  constexpr int kCalls = kit::kSanitized ? 5 : 12;
  constexpr std::array<std::size_t, 8> kSizes{0,
                                              1,
                                              7,
                                              1000,
                                              SharedWindows::kSlotBytes - 1,
                                              SharedWindows::kSlotBytes,
                                              SharedWindows::kSlotBytes + 1,
                                              3 * SharedWindows::kSlotBytes + 5};
  for (const int ranks : {2, 4}) {
    const World world(ranks);
    onWindows(world, [&](WindowGather& gather, int rank, AttachableBackend& /*group*/) {
      std::mt19937_64 random(9);  // the same on all ranks
      for (int call = 0; call < kCalls; ++call) {
        std::vector<Bytes> expected;
        std::vector<Bytes> own;
        std::vector<WindowGather::Part> parts;
        for (int owner = 0; owner < ranks; ++owner) {
          const std::size_t size = kSizes.at(random() % kSizes.size());
          expected.push_back(randomBytes(size, static_cast<std::uint64_t>(call * 100 + owner)));
          own.push_back(owner == rank ? expected.back() : Bytes(size));
        }
        std::transform(own.begin(), own.end(), std::back_inserter(parts), partOf);
        gather.run(parts);
        ASSERT_EQ(own, expected) << "call " << call << " on rank " << rank;
      }
    });
  }
}

// Spans hold the sum, of terms in the order of ranks; what is between them stays.
TEST_F(WindowGatherTest, AddsTheSpansThatARankAsksFor) {
  for (const int ranks : {2, 3}) {
    const World world(ranks);
    std::vector<at::Tensor> results(static_cast<std::size_t>(ranks));
    onWindows(world, [&](WindowGather& gather, int rank, AttachableBackend& /*group*/) {
      for (const std::int64_t numel : {10, 70'000, 200'000}) {
        const auto values = [&](int of) { return at::arange(numel, at::kFloat) + static_cast<float>(1000 * of); };
        const at::Tensor buffer = values(rank);
        const auto length = static_cast<std::size_t>(numel);
        // Each rank its own: the first elements, and from the middle over the border of a piece.
        const std::vector<core::Span> spans{{0, 2 + static_cast<std::size_t>(rank)}, {length / 2, length / 3}};
        gather.sum({static_cast<std::byte*>(buffer.data_ptr()), buffer.nbytes()}, reductionFor(at::kFloat), spans);
        at::Tensor sum = at::zeros({numel});
        for (int other = 0; other < ranks; ++other) {
          sum += values(other);
        }
        at::Tensor expected = values(rank);
        for (const core::Span& span : spans) {
          const auto begin = static_cast<std::int64_t>(span.begin);
          const auto end = begin + static_cast<std::int64_t>(span.count);
          expected.slice(0, begin, end).copy_(sum.slice(0, begin, end));
        }
        EXPECT_TRUE(at::equal(buffer, expected)) << numel << " elements on rank " << rank << " of " << ranks;
      }
      // Of numbers whose sum depends on the order: the same bits everywhere.
      const at::Tensor buffer = at::full({5}, rank == 0 ? 1e8F : 0.1F + static_cast<float>(rank) * 3e7F);
      gather.sum({static_cast<std::byte*>(buffer.data_ptr()), buffer.nbytes()}, reductionFor(at::kFloat), {{0, 5}});
      results[static_cast<std::size_t>(rank)] = buffer;
    });
    for (int rank = 1; rank < ranks; ++rank) {
      EXPECT_TRUE(at::equal(results[0], results[static_cast<std::size_t>(rank)]));
    }
  }
}

// Sizes that differ are found by the stamp, in the first piece, and no part is read.
TEST_F(WindowGatherTest, NamesRanksThatMakeDifferentExchanges) {
  const World world(2);
  std::vector<std::string> errors(2);
  std::barrier<> end(2);
  onWindows(world, [&](WindowGather& gather, int rank, AttachableBackend& /*group*/) {
    Bytes mine = randomBytes(rank == 0 ? 100 : 108, 1);
    Bytes its(100);
    const Bytes before = its;
    std::vector<WindowGather::Part> parts{partOf(mine), partOf(its)};
    if (rank == 1) {
      std::swap(parts[0], parts[1]);
    }
    errors[static_cast<std::size_t>(rank)] = errorOf([&] { gather.run(parts); });
    EXPECT_EQ(its, before);
    const std::string again = errorOf([&] { gather.run(parts); });
    EXPECT_TRUE(has(again, "an earlier exchange was interrupted")) << again;
    end.arrive_and_wait();
  });
  const auto differs = [](const std::string& error) {
    return has(error, "a gather: ranks 0 and 1 make different exchanges #1");
  };
  // The slower one may learn of the other's end first.
  EXPECT_TRUE(differs(errors[0]) || has(errors[0], "rank 1 was interrupted")) << errors[0];
  EXPECT_TRUE(differs(errors[1]) || has(errors[1], "rank 0 was interrupted")) << errors[1];
  EXPECT_TRUE(differs(errors[0]) || differs(errors[1]));
}

TEST_F(WindowGatherTest, NamesARankThatHasLeft) {
  const World world(3);
  std::barrier<> gone(3);
  onRanks(3, [&](int rank) {
    GroupOptions options("prague", seconds(30));
    const auto group = makeBackend<AttachableBackend>(rank, 3, "prague", world.inner(rank),
                                                      c10::make_intrusive<GroupOptions>(options));
    auto gather =
        std::make_unique<WindowGather>(group->shareMemory(kWindowTag, true), group->dataTransport(), "a gather");
    if (rank == 2) {
      gather.reset();
      gone.arrive_and_wait();
    } else {
      gone.arrive_and_wait();
      Bytes mine = randomBytes(100, 1);
      std::vector<Bytes> its(3, Bytes(100));
      std::vector<WindowGather::Part> parts;
      std::transform(its.begin(), its.end(), std::back_inserter(parts), partOf);
      parts[static_cast<std::size_t>(rank)] = partOf(mine);
      const std::string error = errorOf([&] { gather->run(parts); });
      // One of the two may learn of the other's error first.
      EXPECT_TRUE(has(error, "rank 2 has left") || has(error, c10::str("rank ", 1 - rank, " was interrupted")))
          << error;
    }
    gone.arrive_and_wait();
    gather.reset();
    group->shutdown();
  });
}

// Who waits for memory is ended by a failure of the group as any other, and by its timeout.
TEST_F(WindowGatherTest, AWaitForMemoryEndsWithItsGroup) {
  for (const bool by_timeout : {false, true}) {
    const World world(2);
    std::barrier<> end(2);
    onWindows(
        world,
        [&](WindowGather& gather, int rank, AttachableBackend& group) {
          if (rank == 1) {
            if (!by_timeout) {
              std::this_thread::sleep_for(milliseconds(50));
              group.health()->poison(1, "rank 1 has had enough");
            }
            end.arrive_and_wait();
            return;
          }
          Bytes mine(10);
          Bytes its(10);
          const std::string error = errorOf([&] { gather.run({partOf(mine), partOf(its)}); });
          EXPECT_TRUE(has(error, by_timeout ? "timed out in a gather with rank 1" : "rank 1 has had enough")) << error;
          end.arrive_and_wait();
        },
        seconds(by_timeout ? 1 : 30));
  }
}

}  // namespace
}  // namespace torchext
