#include "kfac/linalg/patches.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace torchext {
namespace {

using Four = Patches::Four;

// Calls visit(place in memory) for each of `axes`, the last dimension first.
template <class Visit>
void walk(const Patches::Axes& axes, const Visit& visit) {
  Four at{0, 0, 0, 0};
  for (std::int64_t i = 0; i < axes.total(); ++i) {
    std::int64_t place = 0;
    for (std::size_t axis = 0; axis < 4; ++axis) {
      place += at[axis] * axes.step[axis];
    }
    visit(place);
    for (std::size_t axis = 4; axis-- > 0;) {
      if (++at[axis] < axes.count[axis]) {
        break;
      }
      at[axis] = 0;
    }
  }
}

// Elements that a walk with these steps reaches, from the first one on.
std::int64_t reach(const Patches& patches) {
  std::int64_t last = 0;
  for (const Patches::Axes* axes : {&patches.positions, &patches.places}) {
    for (std::size_t axis = 0; axis < 4; ++axis) {
      last += (axes->count[axis] - 1) * axes->step[axis];
    }
  }
  return last + 1;
}

template <class T>
void expectAsDefined(const Patches& patches) {
  std::vector<T> memory(static_cast<std::size_t>(reach(patches)));
  for (std::size_t i = 0; i < memory.size(); ++i) {
    memory[i] = static_cast<T>(i);  // says where it was read
  }
  std::vector<T> expected;
  walk(patches.positions, [&](std::int64_t position) {
    walk(patches.places, [&](std::int64_t place) { expected.push_back(static_cast<T>(position + place)); });
  });
  std::vector<T> rows(expected.size() + 1, T(-1));  // exactly as large as it may be under a sanitizer, and one to see
  patches.copy(memory.data(), rows.data());
  EXPECT_EQ(rows.back(), T(-1)) << "wrote beyond the last row";
  rows.pop_back();
  EXPECT_EQ(rows, expected);
}

TEST(Patches, OfRandomWindowsAreWhatTheirStepsSay) {
  std::mt19937 random(1);
  const auto up_to = [&](std::int64_t most) { return static_cast<std::int64_t>(random() % (most + 1)); };
  for (int round = 0; round < 400; ++round) {
    Patches patches;
    for (std::size_t axis = 0; axis < 4; ++axis) {
      patches.positions.count[axis] = 1 + up_to(3);
      patches.positions.step[axis] = up_to(6);
      patches.places.count[axis] = 1 + up_to(3);
      patches.places.step[axis] = up_to(4);
    }
    expectAsDefined<float>(patches);
    expectAsDefined<double>(patches);
  }
}

// The kernels of most models: 3 wide, side by side, which has a loop of its own.
TEST(Patches, OfThreePlacesSideBySide) {
  for (const std::int64_t stride : {1, 2, 3}) {
    // 2 images of 3 channels, 5 x 6 elements; a 3 x 3 kernel.
    Patches patches;
    patches.positions = {{2, 1, 3 / stride, (6 - 3) / stride + 1}, {3 * 30, 0, 6 * stride, stride}};
    patches.places = {{3, 1, 3, 3}, {30, 0, 6, 1}};
    expectAsDefined<float>(patches);
  }
}

TEST(Patches, OfNothingWriteNothing) {
  Patches patches;
  patches.positions.count = {0, 1, 1, 1};
  float untouched = 7;
  patches.copy(static_cast<const float*>(nullptr), &untouched);
  EXPECT_EQ(untouched, 7);
}

}  // namespace
}  // namespace torchext
