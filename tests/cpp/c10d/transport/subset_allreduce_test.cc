// SubsetAllreduce adds up one buffer over any subset of ranks, exactly, or ends with an error that says why.
#include "c10d/transport/subset_allreduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <cstring>
#include <deque>
#include <numeric>
#include <optional>
#include <random>

#include <ATen/ATen.h>

#include "c10d/backend/attachable_backend.h"
#include "c10d/backend/process_group_prague.h"
#include "c10d/fault/explain_error.h"
#include "c10d/fault/fault_points.h"
#include "kit/ranks_as_threads.h"

namespace torchext {
namespace {

using kit::errorOf;
using kit::has;
using kit::World;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kTag = 100;
// Long messages of short buffers: a few hundred bytes go round in many segments.
const TransferTuning kTiny{.frame_bytes = 256,
                           .direct_total_bytes = 512,
                           .segment_bytes = 128,
                           .segment_bytes_of_pair = 192,
                           .least_segment_bytes = 64,
                           .segments_ahead = 2,
                           .segments_ahead_of_line = 3,
                           .line_bytes_per_second = 0,
                           .least_shared_bytes = 1};

TransferTuning onLine() {
  TransferTuning tuning = kTiny;
  tuning.line_bytes_per_second = 1e18;
  return tuning;
}

// Over nothing but the network.
PointToPoint plainTransport(const c10::intrusive_ptr<c10d::Backend>& backend) {
  return {backend, [](const PointToPoint::WorkPtr& work, int /*peer*/, const char* /*what*/) { work->wait(); },
          [](const PointToPoint::Look& look, int /*peer*/, const char* /*what*/) {
            while (!look(milliseconds(20))) {
            }
          },
          [](int peer, const char* /*what*/, const std::string& error) {
            return std::make_exception_ptr(std::runtime_error(c10::str("rank ", peer, " refused: ", error)));
          }};
}

SubsetAllreduce makeReduce(const World& world, int rank, const TransferTuning& tuning, bool shared) {
  PointToPoint transport = plainTransport(world.data->connect(rank));
  auto windows = shared ? SharedWindows::open(transport, kTag + 7, true) : nullptr;
  return {std::move(transport), kTag, std::move(windows), tuning};
}

// Small whole numbers: sums are exact in every dtype, in whatever order.
at::Tensor wholeNumbers(std::int64_t numel, c10::ScalarType dtype, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  at::Tensor values = at::empty({numel}, at::kDouble);
  for (std::int64_t i = 0; i < numel; ++i) {
    values.mutable_data_ptr<double>()[i] = static_cast<double>(random() % 17) - 8;
  }
  return values.to(dtype);
}

bool sameBits(const at::Tensor& left, const at::Tensor& right) {
  return left.nbytes() == right.nbytes() &&
         (left.nbytes() == 0 || std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0);
}

class SubsetAllreduceTest : public kit::RanksTest {
 protected:
  void randomSubsets(const TransferTuning& tuning, bool shared, std::uint64_t seed, int rounds);
  void mismatch(const std::function<void(int rank, std::int64_t& numel, c10::ScalarType& dtype, std::uint64_t& call,
                                         double& scale)>& change,
                const std::string& first, const std::string& second, bool shared);
  void faultyAverage(const std::string& point, std::int64_t numel, bool shared);
};

// Rounds of random disjoint subsets that cover the ranks, each with its own dtype, size and scale. Nobody waits between
// rounds, so that calls overlap.
void SubsetAllreduceTest::randomSubsets(const TransferTuning& tuning, bool shared, std::uint64_t seed, int rounds) {
  constexpr int kRanks = 5;
  constexpr std::array kTypes{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};
  constexpr std::array kSizes{0, 1, 2, 3, 5, 15, 16, 17, 63, 64, 65, 128, 200, 333, 1024, 1500};
  const World world(kRanks);
  std::barrier<> end(kRanks);
  onRanks(kRanks, [&](int rank) {
    SubsetAllreduce reduce = makeReduce(world, rank, tuning, shared);
    std::mt19937_64 random(seed);  // the same on all ranks
    bool exact_so_far = true;
    for (int round = 0; round < rounds; ++round) {
      std::vector<int> order(kRanks);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      for (auto begin = order.begin(); begin != order.end();) {
        const auto left = static_cast<std::uint64_t>(order.end() - begin);
        const auto end = begin + static_cast<std::ptrdiff_t>(1 + random() % left);
        std::vector<int> members(begin, end);
        begin = end;
        std::sort(members.begin(), members.end());
        const auto dtype = kTypes[random() % kTypes.size()];
        const auto numel = kSizes[random() % kSizes.size()];
        const std::uint64_t base = random();
        const double scale = random() % 2 == 0 ? 1.0 : 1.0 / static_cast<double>(members.size());
        if (!std::binary_search(members.begin(), members.end(), rank)) {
          continue;
        }
        const auto own = static_cast<std::uint64_t>(rank);
        at::Tensor buffer = wholeNumbers(numel, dtype, base + own);
        reduce.run(buffer, members, static_cast<std::uint64_t>(round), scale);
        at::Tensor sum = at::zeros({numel}, at::kDouble);
        for (const int member : members) {
          sum += wholeNumbers(numel, at::kDouble, base + static_cast<std::uint64_t>(member));
        }
        const auto exact = dtype == at::kDouble ? sum * scale : (sum.to(at::kFloat) * static_cast<float>(scale));
        if (exact_so_far && !sameBits(buffer, exact.to(dtype))) {
          exact_so_far = false;  // the others go on, and so does this rank
          ADD_FAILURE() << "seed " << seed << ", round " << round << ", rank " << rank << ", " << numel
                        << " elements of " << c10::toString(dtype) << " over " << c10::Join(",", members) << ": "
                        << buffer << exact;
        }
      }
    }
    EXPECT_EQ(reduce.bytesShared() > 0, shared);
    end.arrive_and_wait();
    EXPECT_EQ(world.data->pending(), 0U) << "a message was left over";
    end.arrive_and_wait();
  });
  EXPECT_FALSE(world.data->jammed());
}

constexpr int kRounds = kit::kSanitized ? 40 : 120;

TEST_F(SubsetAllreduceTest, AddsExactlyOverRandomSubsets) {
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    randomSubsets(kTiny, false, seed, kRounds);
  }
}

TEST_F(SubsetAllreduceTest, AddsExactlyOnALine) {
  for (std::uint64_t seed = 10; seed < 13; ++seed) {
    randomSubsets(onLine(), false, seed, kRounds);
  }
}

TEST_F(SubsetAllreduceTest, AddsExactlyThroughSharedMemory) {
  for (std::uint64_t seed = 20; seed < 23; ++seed) {
    randomSubsets(kTiny, true, seed, kRounds);
  }
}

// As users have it: direct, in a ring of several segments, and in several pieces of a window.
TEST_F(SubsetAllreduceTest, AddsExactlyWithItsOwnTuning) {
  for (const bool shared : {false, true}) {
    for (const int ranks : {2, 3}) {
      const World world(ranks);
      std::vector<int> all(static_cast<std::size_t>(ranks));
      std::iota(all.begin(), all.end(), 0);
      onRanks(ranks, [&](int rank) {
        SubsetAllreduce reduce = makeReduce(world, rank, {}, shared);
        for (const std::int64_t numel : {0, 1, 1000, 100'000, 600'000}) {
          at::Tensor buffer = at::full({numel}, static_cast<float>(rank + 1));
          reduce.run(buffer, all, 1, 0.5);
          EXPECT_TRUE(at::equal(buffer, at::full({numel}, 0.25F * static_cast<float>(ranks * (ranks + 1)))))
              << numel << " elements on " << ranks << " ranks";
        }
        EXPECT_EQ(reduce.bytesShared() > 0, shared);
      });
    }
  }
}

// Sums of other numbers depend on their order, which must be one for all members.
TEST_F(SubsetAllreduceTest, MembersEndBitEqual) {
  for (const bool shared : {false, true}) {
    constexpr int kRanks = 4;
    const World world(kRanks);
    std::vector<at::Tensor> results(kRanks);
    onRanks(kRanks, [&](int rank) {
      SubsetAllreduce reduce = makeReduce(world, rank, kTiny, shared);
      std::vector<at::Tensor> own;
      for (const std::int64_t numel : {1, 7, 50, 777}) {
        for (const auto dtype : {at::kFloat, at::kHalf}) {
          std::mt19937_64 random(static_cast<std::uint64_t>(1000 * rank + numel));
          std::normal_distribution<double> normal(0.0, 100.0);
          at::Tensor values = at::empty({numel}, at::kDouble);
          std::generate_n(values.mutable_data_ptr<double>(), numel, [&] { return normal(random); });
          at::Tensor buffer = values.to(dtype);
          reduce.run(buffer, {0, 1, 2, 3}, 1, 1.0 / 3.0);
          own.push_back(buffer.to(at::kDouble));
        }
      }
      results[static_cast<std::size_t>(rank)] = at::cat(own);
    });
    for (int rank = 1; rank < kRanks; ++rank) {
      EXPECT_TRUE(sameBits(results[0], results[static_cast<std::size_t>(rank)])) << "shared: " << shared;
    }
  }
}

TEST_F(SubsetAllreduceTest, CountsWhatItSends) {
  const World world(2);
  onRanks(2, [&](int rank) {
    SubsetAllreduce reduce = makeReduce(world, rank, kTiny, false);
    at::Tensor buffer = at::ones({10});
    reduce.run(buffer, {0, 1}, 1, 1.0);
    EXPECT_EQ(reduce.bytesSent(), sizeof(core::SubsetHeader) + 40);
    buffer = at::ones({4096});  // in a ring of two each sends the buffer once
    reduce.run(buffer, {0, 1}, 2, 1.0);
    EXPECT_EQ(reduce.bytesSent(), 2 * sizeof(core::SubsetHeader) + 40 + 4096 * 4);
  });
}

// The odd rank, 1 of 0..2, passes something else. All say which two calls differ, no buffer changes, and the next call
// of the same objects is exact: no message is left over.
void SubsetAllreduceTest::mismatch(const std::function<void(int rank, std::int64_t& numel, c10::ScalarType& dtype,
                                                            std::uint64_t& call, double& scale)>& change,
                                   const std::string& first, const std::string& second, bool shared) {
  constexpr int kRanks = 3;
  for (const std::int64_t base : {4, 40, 400}) {  // direct, direct or ring, ring
    const World world(kRanks);
    std::barrier<> end(kRanks);
    onRanks(kRanks, [&](int rank) {
      SubsetAllreduce reduce = makeReduce(world, rank, kTiny, shared);
      std::int64_t numel = base;
      c10::ScalarType dtype = at::kFloat;
      std::uint64_t call = 7;
      double scale = 1.0;
      change(rank, numel, dtype, call, scale);
      const at::Tensor buffer = wholeNumbers(numel, dtype, static_cast<std::uint64_t>(rank));
      const at::Tensor before = buffer.clone();
      std::string text;
      EXPECT_THROW(
          {
            try {
              reduce.run(buffer, {0, 1, 2}, call, scale);
            } catch (const c10::DistBackendError& error) {
              text = error.what_without_backtrace();
              throw;
            }
          },
          c10::DistBackendError);
      const auto of_base = [&](std::string part) {
        const auto at = part.find('#');
        return at == std::string::npos ? part : part.replace(at, 1, std::to_string(base));
      };
      EXPECT_TRUE(has(text, c10::str("rank 1 passed ", of_base(second)))) << text;
      EXPECT_TRUE(has(text, of_base(first))) << text;
      EXPECT_TRUE(has(text, "rank 0 passed") || has(text, "rank 2 passed")) << text;
      EXPECT_TRUE(has(text, "No buffer was changed")) << text;
      EXPECT_TRUE(sameBits(buffer, before)) << "a byte was written on rank " << rank;
      at::Tensor next = at::full({base}, static_cast<float>(rank));
      reduce.run(next, {0, 1, 2}, 8, 1.0);
      EXPECT_TRUE(at::equal(next, at::full({base}, 3.0F)));
      end.arrive_and_wait();
      EXPECT_EQ(world.data->pending(), 0U) << "a message was left over";
      end.arrive_and_wait();
    });
  }
}

TEST_F(SubsetAllreduceTest, FindsMismatchesBeforeAnyByteIsWritten) {
  for (const bool shared : {false, true}) {
    mismatch([](int rank, auto& numel, auto& /*dtype*/, auto& /*call*/, auto& /*scale*/) { numel += rank == 1; },
             "# elements of Float", "", shared);
    // Direct on one side, a ring on the other.
    mismatch([](int rank, auto& numel, auto& /*dtype*/, auto& /*call*/,
                auto& /*scale*/) { numel = rank == 1 ? 5000 : numel; },
             "# elements of Float", "5000 elements of Float", shared);
    mismatch(
        [](int rank, auto& numel, auto& /*dtype*/, auto& /*call*/, auto& /*scale*/) { numel = rank == 1 ? 0 : numel; },
        "# elements of Float", "0 elements of Float", shared);
    mismatch([](int rank, auto& /*numel*/, auto& dtype, auto& /*call*/,
                auto& /*scale*/) { dtype = rank == 1 ? at::kDouble : at::kFloat; },
             "elements of Float", "# elements of Double", shared);
    // As many bytes.
    mismatch([](int rank, auto& /*numel*/, auto& dtype, auto& /*call*/,
                auto& /*scale*/) { dtype = rank == 1 ? at::kHalf : at::kBFloat16; },
             "elements of BFloat16", "# elements of Half", shared);
    mismatch([](int rank, auto& /*numel*/, auto& /*dtype*/, auto& call, auto& /*scale*/) { call += rank == 1; },
             "in call 7", "# elements of Float scaled by 1 in call 8", shared);
    mismatch(
        [](int rank, auto& /*numel*/, auto& /*dtype*/, auto& /*call*/, auto& scale) { scale = rank == 1 ? 0.5 : 1.0; },
        "scaled by 1 in call", "# elements of Float scaled by 0.5", shared);
  }
}

// Rank 2 means {1, 2}, the others mean all three: what it sends is not taken for its part of their call.
TEST_F(SubsetAllreduceTest, FindsOtherMembers) {
  const World world(3, milliseconds(500));
  std::vector<std::string> texts(3);
  onRanks(3, [&](int rank) {
    SubsetAllreduce reduce = makeReduce(world, rank, kTiny, false);
    at::Tensor buffer = at::full({6}, static_cast<float>(rank));
    const std::vector<int> members = rank == 2 ? std::vector{1, 2} : std::vector{0, 1, 2};
    texts[static_cast<std::size_t>(rank)] = errorOf([&] { reduce.run(buffer, members, 1, 1.0); });
    EXPECT_TRUE(at::equal(buffer, at::full({6}, static_cast<float>(rank))));
  });
  // Rank 0 waits for rank 2, which has not called it; rank 1 and 2 have each other's headers.
  EXPECT_TRUE(has(texts[0], "Timed out") || has(texts[0], "closed")) << texts[0];
  EXPECT_TRUE(has(texts[2], "rank 2 passed")) << texts[2];
}

// What no torchext sends: junk, a header that ends too early (Gloo accepts it), one of another rank.
TEST_F(SubsetAllreduceTest, RefusesMalformedHeaders) {
  for (int kind = 0; kind < 3; ++kind) {
    const World world(2);
    onRanks(2, [&](int rank) {
      if (rank == 0) {
        SubsetAllreduce reduce = makeReduce(world, rank, kTiny, false);
        at::Tensor buffer = at::ones({4});
        reduce.run(buffer, {0, 1}, 1, 1.0);  // so that a slot holds a good header
        const at::Tensor before = buffer.clone();
        const std::string error = errorOf([&] { reduce.run(buffer, {0, 1}, 1, 1.0); });
        EXPECT_TRUE(has(error, "rank 1 refused")) << error;
        EXPECT_TRUE(sameBits(buffer, before));
        return;
      }
      const PointToPoint transport = plainTransport(world.data->connect(rank));
      core::SubsetHeader header;
      header.dtype = static_cast<std::int16_t>(at::kFloat);
      header.rank = 1;
      header.call_id = 1;
      header.members_hash = core::hashMembers({0, 1});
      header.numel = 4;
      std::array<std::byte, sizeof(header) + 16> frame{};
      std::memcpy(frame.data(), &header, sizeof(header));
      std::array<std::byte, sizeof(header) + 256> arrived{};
      const auto exchange = [&](std::size_t bytes) {
        const auto receive = transport.recv(arrived.data(), arrived.size(), 0, kTag);
        transport.send(frame.data(), bytes, 0, kTag)->wait();
        receive->wait();
      };
      exchange(frame.size());
      if (kind == 0) {
        frame.fill(std::byte{0x5a});
      } else if (kind == 2) {
        header.rank = 0;
        std::memcpy(frame.data(), &header, sizeof(header));
      }
      exchange(kind == 1 ? 6 : frame.size());
    });
  }
}

// The same in a whole group: it ends on all ranks, with the sender's name.
TEST_F(SubsetAllreduceTest, AMalformedHeaderEndsTheGroup) {
  for (const std::int64_t bytes : {5, 24}) {
    const World world(3);
    onGroups<ProcessGroupPrague>(
        world, ProcessGroupPrague::Options(seconds(30)), [&](ProcessGroupPrague& group, int rank) {
          const std::string error = errorOf([&] {
            std::vector<at::Tensor> tensors{at::ones({1})};
            if (rank == 0) {
              group.partialAllReduce(at::ones({3}), {0, 1})->wait();
            } else if (rank == 1) {
              std::vector<at::Tensor> junk{at::full({bytes}, bytes == 5 ? 0xff : 0, at::kByte)};
              group.inner().of(c10::DeviceType::CPU)->send(junk, 0, AttachableBackend::kGroupTags)->wait();
              group.recv(tensors, 2, 0)->wait();
            } else {
              group.recv(tensors, 1, 0)->wait();
            }
          });
          EXPECT_TRUE(has(error, "rank 1 sent a malformed message: malformed ")) << error;
          EXPECT_EQ(group.health()->reason().get().rank, 1);
        });
  }
}

// A rank dies at its n-th message, for every n: each survivor has the exact sum or an error that names the dead, and
// none hangs.
TEST_F(SubsetAllreduceTest, NamesARankThatDiesAtAnyMessage) {
  constexpr int kRanks = 3;
  constexpr int kDeaths = 12;  // more than a rank sends: it lives on in the last
  std::atomic<int> errors{0};
  std::atomic<int> sums{0};
  std::vector<std::unique_ptr<World>> worlds;
  std::deque<std::barrier<>> over;
  for (int death = 0; death < kDeaths; ++death) {
    worlds.push_back(std::make_unique<World>(kRanks));
    over.emplace_back(kRanks);
  }
  GroupOptions options("prague", seconds(30));
  options.heartbeat_timeout = milliseconds(0);
  onRanks(kRanks * kDeaths, [&](int thread) {
    const int death = thread / kRanks;
    const int rank = thread % kRanks;
    const World& world = *worlds[static_cast<std::size_t>(death)];
    const auto group = makeBackend<AttachableBackend>(rank, kRanks, "prague", world.inner(rank),
                                                      c10::make_intrusive<GroupOptions>(options));
    if (rank == 1) {
      world.data->afterSends(1, death + 1, [&world] { world.kill(1); });
    }
    at::Tensor buffer = at::full({150}, static_cast<float>(rank + 1));
    const std::string error = errorOf([&] {
      SubsetAllreduce reduce(group->dataTransport(), AttachableBackend::kGroupTags, nullptr, kTiny);
      try {
        reduce.run(buffer, {0, 1, 2}, 1, 1.0);
      } catch (...) {
        std::rethrow_exception(
            explainToAll(*group->health(), std::current_exception(), {.name = "partial_all_reduce"}));
      }
    });
    if (rank != 1 || death == kDeaths - 1) {
      if (error.empty()) {
        ++sums;
        EXPECT_TRUE(at::equal(buffer, at::full({150}, 6.0F))) << "death " << death << ", rank " << rank;
      } else {
        ++errors;
        EXPECT_TRUE(has(error, "rank 1 died (connection closed)")) << "death " << death << ": " << error;
        EXPECT_NE(death, kDeaths - 1) << error;
        EXPECT_TRUE(group->health()->reason().lostRanks().contains(1));
      }
    }
    over[static_cast<std::size_t>(death)].arrive_and_wait();
    group->shutdown();
  });
  EXPECT_GE(errors, 8) << "too few deaths fell into the call";
  EXPECT_GE(sums, kRanks);
}

// Which rank it is, the machine decides: the one that passes first. It says so itself, and all others name it.
void SubsetAllreduceTest::faultyAverage(const std::string& point, std::int64_t numel, bool shared) {
  constexpr int kRanks = 3;
  const World world(kRanks);
  std::vector<std::string> errors(kRanks);
  armFaultPoint(point, "throw", 0);
  ProcessGroupPrague::Options options(seconds(30));
  options.shared_memory = shared;
  onGroups<ProcessGroupPrague>(world, options, [&](ProcessGroupPrague& group, int rank) {
    const at::Tensor tensor = at::full({numel}, static_cast<float>(rank));
    std::string& error = errors[static_cast<std::size_t>(rank)];
    error = errorOf([&] { group.partialAllReduce(tensor, {0, 1, 2})->wait(); });
    // One to whom all had come before has its result.
    EXPECT_TRUE(!error.empty() || at::equal(tensor, at::ones({numel})));
    EXPECT_TRUE(kit::soon([&] { return group.health()->failed(); }));
  });
  int faulty = -1;
  for (int rank = 0; rank < kRanks; ++rank) {
    if (has(errors[static_cast<std::size_t>(rank)], "fault point " + point) &&
        !has(errors[static_cast<std::size_t>(rank)], " failed in ")) {
      EXPECT_EQ(faulty, -1);
      faulty = rank;
    }
  }
  EXPECT_NE(faulty, -1);
  int told = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    const std::string& error = errors[static_cast<std::size_t>(rank)];
    if (rank != faulty && !error.empty()) {
      ++told;
      EXPECT_TRUE(has(error, c10::str("rank ", faulty, " failed in partial_all_reduce: fault point ", point))) << error;
    }
  }
  EXPECT_GE(told, 1);
}

TEST_F(SubsetAllreduceTest, NamesARankThatFailsAfterTheHeaders) { faultyAverage("subset.headers", 400'000, false); }
TEST_F(SubsetAllreduceTest, NamesARankThatFailsHalfwayInTheRing) { faultyAverage("subset.halfway", 400'000, false); }
TEST_F(SubsetAllreduceTest, NamesARankThatFailsInItsWindow) { faultyAverage("window.written", 400'000, true); }

// Rank 2 never comes; what waits for it ends with the abort, at once, and untouched.
TEST_F(SubsetAllreduceTest, AnAbortEndsTheWaitOnAllRanks) {
  for (const std::int64_t numel : {10, 400'000}) {
    const World world(3);
    std::barrier<> ready(3);
    onGroups<ProcessGroupPrague>(world, ProcessGroupPrague::Options(seconds(30)),
                                 [&](ProcessGroupPrague& group, int rank) {
                                   const at::Tensor tensor = at::full({numel}, static_cast<float>(rank));
                                   if (rank == 2) {
                                     ready.arrive_and_wait();
                                     std::this_thread::sleep_for(milliseconds(50));
                                     group.abort();
                                     return;
                                   }
                                   const auto work = group.partialAllReduce(tensor, {0, 1, 2});
                                   ready.arrive_and_wait();
                                   const auto start = std::chrono::steady_clock::now();
                                   const std::string error = errorOf([&] { work->wait(); });
                                   EXPECT_TRUE(has(error, "rank 2 called abort()")) << error;
                                   EXPECT_LT(std::chrono::steady_clock::now() - start, kit::kSoon);
                                   EXPECT_TRUE(at::equal(tensor, at::full({numel}, static_cast<float>(rank))));
                                 });
  }
}

TEST_F(SubsetAllreduceTest, NamesWhoDoesNotComeInTime) {
  const World world(3);
  ProcessGroupPrague::Options options(milliseconds(1500));
  options.shared_memory = false;
  std::vector<std::string> errors(3);
  std::barrier<> end(3);
  onGroups<ProcessGroupPrague>(world, options, [&](ProcessGroupPrague& group, int rank) {
    if (rank != 2) {
      errors[static_cast<std::size_t>(rank)] = errorOf([&] {
        group.partialAllReduce(at::ones({5}), {0, 1, 2})->wait();
      });
    }
    end.arrive_and_wait();
  });
  for (const int rank : {0, 1}) {
    const std::string& error = errors[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(has(error, "timed out in partial_all_reduce with rank 2")) << error;
  }
}

TEST_F(SubsetAllreduceTest, RefusesArgumentsThatThisRankCanSee) {
  const World world(2);
  onGroups<ProcessGroupPrague>(world, ProcessGroupPrague::Options(seconds(30)),
                               [&](ProcessGroupPrague& group, int rank) {
                                 const at::Tensor good = at::ones({3});
                                 const auto refusal = [&](const at::Tensor& tensor, const std::vector<int>& members) {
                                   return errorOf([&] { group.partialAllReduce(tensor, members); });
                                 };
                                 EXPECT_TRUE(has(refusal(good, {0, 1, 2}), "member 2 is not a rank of this group"));
                                 EXPECT_TRUE(has(refusal(good, {0, 1, 1}), "rank 1 is named twice"));
                                 EXPECT_TRUE(has(refusal(good, {1 - rank}), "is not among the members"));
                                 EXPECT_TRUE(has(refusal(at::ones({3}, at::kLong), {0, 1}), "Long"));
                                 EXPECT_TRUE(has(refusal(at::ones({4, 4}).t(), {0, 1}), "contiguous"));
                                 // Nothing was sent, and nothing is out of order.
                                 const at::Tensor buffer = at::full({3}, static_cast<float>(rank));
                                 group.partialAllReduce(buffer, {1, 0})->wait();
                                 EXPECT_TRUE(at::equal(buffer, at::full({3}, 0.5F)));
                                 group.partialAllReduce(buffer, {rank})->wait();
                                 EXPECT_TRUE(at::equal(buffer, at::full({3}, 0.5F)));
                               });
}

// Members of both count calls for themselves: averages of {0, 1} and {0, 1, 2} may interleave on each rank.
TEST_F(SubsetAllreduceTest, SubsetsTakeTurns) {
  const World world(3);
  onGroups<ProcessGroupPrague>(
      world, ProcessGroupPrague::Options(seconds(30)), [&](ProcessGroupPrague& group, int rank) {
        std::vector<at::Tensor> tensors;
        std::vector<c10::intrusive_ptr<c10d::Work>> works;
        for (int round = 0; round < 30; ++round) {
          const std::vector<int> members = round % 3 == 0 ? std::vector{0, 1, 2} : std::vector{0, round % 3};
          if (std::find(members.begin(), members.end(), rank) != members.end()) {
            tensors.push_back(at::full({round * 7}, static_cast<float>(rank * 6)));
            works.push_back(group.partialAllReduce(tensors.back(), members));
            const float expected = round % 3 == 0 ? 6.0F : 3.0F * static_cast<float>(round % 3);
            works.back()->wait();
            EXPECT_TRUE(at::equal(tensors.back(), at::full({round * 7}, expected)));
          }
        }
      });
}

}  // namespace
}  // namespace torchext
