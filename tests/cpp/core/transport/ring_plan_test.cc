#include "core/transport/ring_plan.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <stdexcept>
#include <vector>

#include "core/base/check.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

TEST(RingPlan, BadInputNamesValueAndRange) {
  EXPECT_THROW_MESSAGE(RingPlan(1, 0, 2, 1), std::invalid_argument, "element_size = 0");
  EXPECT_THROW_MESSAGE(RingPlan(1, 4, 0, 1), std::invalid_argument, "group_size = 0: allowed 1 or more");
  EXPECT_THROW_MESSAGE(RingPlan(1, 4, 1, 0), std::invalid_argument, "segment_bytes = 0");
  EXPECT_THROW_MESSAGE(RingPlan(8, 4, 2, 8).chunk(2), std::out_of_range, "chunk = 2: allowed 0..1");
  EXPECT_THROW_MESSAGE(static_cast<void>(RingPlan(8, 4, 2, 8).sendChunk(0, 2)), std::out_of_range, "step = 2");
}

// Sets of contributions stand for sums: an element reduced twice or left out shows.
using Contributions = std::multiset<int>;

TEST(RingPlan, EveryMemberEndsWithEveryContributionOnce) {
  for (int size = 1; size <= 17; ++size) {
    const RingPlan plan(1000, 4, size, 64);
    // held[member][chunk]
    std::vector<std::vector<Contributions>> held(index(size));
    for (int member = 0; member < size; ++member) {
      held[index(member)].assign(index(size), Contributions{member});
    }
    for (int step = 0; step < plan.steps(); ++step) {
      const auto before = held;
      for (int member = 0; member < size; ++member) {
        const int chunk = plan.receiveChunk(member, step);
        ASSERT_EQ(chunk, plan.sendChunk(plan.previous(member), step));
        const auto& received = before[index(plan.previous(member))][index(chunk)];
        auto& own = held[index(member)][index(chunk)];
        if (plan.reduces(step)) {
          own.insert(received.begin(), received.end());
        } else {
          own = received;
        }
        if (step == size - 2) {
          ASSERT_EQ(chunk, plan.ownedChunk(member));
          ASSERT_EQ(own.size(), index(size));
        }
      }
    }
    for (const auto& chunks : held) {
      for (const auto& contributions : chunks) {
        ASSERT_EQ(contributions.size(), index(size));
        ASSERT_EQ(std::set<int>(contributions.begin(), contributions.end()).size(), index(size));
      }
    }
  }
}

TEST(RingPlan, ChunksAndSegmentsCoverTheBufferInOrder) {
  for (const std::size_t elements : {0U, 1U, 3U, 7U, 64U, 100U, 1023U, 4096U, 100003U}) {
    for (const std::size_t element_size : {1U, 2U, 4U, 8U, 12U, 16U}) {
      for (const int size : {1, 2, 3, 7, 64}) {
        for (const std::size_t segment_bytes : {1U, 100U, 4096U, 1U << 20U}) {
          const RingPlan plan(elements, element_size, size, segment_bytes);
          const std::size_t line = 64 / std::gcd(std::size_t{64}, element_size);
          const bool aligned = elements / line >= index(size);
          std::size_t next = 0;
          for (int chunk = 0; chunk < size; ++chunk) {
            const Span span = plan.chunk(chunk);
            ASSERT_EQ(span.begin, next);
            ASSERT_TRUE(!aligned || span.count == 0 || span.begin % line == 0);
            for (int segment = 0; segment < plan.segments(chunk); ++segment) {
              const Span part = plan.segment(chunk, segment);
              ASSERT_EQ(part.begin, next);
              ASSERT_GT(part.count, 0U);
              ASSERT_LE(part.count, plan.largestSegment());
              ASSERT_TRUE(part.count == 1 || part.count * element_size <= segment_bytes);
              next += part.count;
            }
            ASSERT_EQ(next, span.begin + span.count);
          }
          ASSERT_EQ(next, elements);
        }
      }
    }
  }
}

TEST(RingPlan, ChunksDifferByOneLineAtMost) {
  const RingPlan plan(1000, 4, 7, 1 << 20);
  for (int chunk = 0; chunk < 7; ++chunk) {
    EXPECT_GE(plan.chunk(chunk).count, 128U);  // 62.5 lines of 16 floats over 7 members: 9 each, the last cut
    EXPECT_LE(plan.chunk(chunk).count, 144U);
  }
  EXPECT_EQ(plan.chunk(0), (Span{0, 144}));
}

}  // namespace
}  // namespace torchext::core
