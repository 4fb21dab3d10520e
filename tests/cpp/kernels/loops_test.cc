// sumInto, scaleInto and weightedSum against element-by-element references, for every type, odd sizes and unaligned
// starts; and the two compilations of each loop (baseline, AVX2) against each other, bit for bit.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/cpu/reduce.h"
#include "kernels/cpu/scale.h"
#include "kernels/cpu/weighted_sum.h"

namespace torchext::cpu {
namespace {

constexpr std::size_t kSizes[] = {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 257, 1000, 4099};

template <class T>
T make(std::mt19937& random) {
  std::normal_distribution<float> normal(0.0F, 10.0F);
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(random());
  } else {
    return Element<T>::store(static_cast<typename Element<T>::Math>(normal(random)));
  }
}

template <class T>
std::vector<T> make_many(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<T> values(n);
  for (T& value : values) {
    value = make<T>(random);
  }
  return values;
}

template <class T>
bool same_bits(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

template <class T>
class SumInto : public testing::Test {};
using SumTypes = testing::Types<float, double, Half, BFloat16, std::int32_t, std::int64_t>;
TYPED_TEST_SUITE(SumInto, SumTypes);

TYPED_TEST(SumInto, AddsElementByElementAndTouchesNothingElse) {
  using E = Element<TypeParam>;
  for (const std::size_t n : kSizes) {
    for (const std::size_t shift : {0, 1, 3}) {
      const auto before = make_many<TypeParam>(n + shift + 2, 1);
      const auto source = make_many<TypeParam>(n + shift, 2);
      auto sum = before;
      sumInto(sum.data() + shift, source.data() + shift, n);
      for (std::size_t i = 0; i < sum.size(); ++i) {
        TypeParam expected = before[i];
        if (i >= shift && i < shift + n) {
          expected = E::store(static_cast<typename E::Math>(E::load(before[i]) + E::load(source[i])));
        }
        ASSERT_TRUE(same_bits(sum[i], expected)) << "n=" << n << " shift=" << shift << " i=" << i;
      }
    }
  }
}

TEST(SumIntoIntegers, WrapAround) {
  std::int32_t sum = std::numeric_limits<std::int32_t>::max();
  const std::int32_t one = 1;
  sumInto(&sum, &one, 1);
  EXPECT_EQ(sum, std::numeric_limits<std::int32_t>::min());
}

template <class T>
class ScaleInto : public testing::Test {};
using ScaleTypes = testing::Types<float, double, Half, BFloat16>;
TYPED_TEST_SUITE(ScaleInto, ScaleTypes);

TYPED_TEST(ScaleInto, MultipliesElementByElementAndTouchesNothingElse) {
  using E = Element<TypeParam>;
  const auto scale = static_cast<typename E::Math>(1.0 / 3.0);
  for (const std::size_t n : kSizes) {
    for (const std::size_t shift : {0, 1, 3}) {
      const auto before = make_many<TypeParam>(n + shift + 2, 3);
      const auto source = make_many<TypeParam>(n + shift, 4);
      auto scaled = before;
      scaleInto(scaled.data() + shift, source.data() + shift, n, scale);
      for (std::size_t i = 0; i < scaled.size(); ++i) {
        const bool inside = i >= shift && i < shift + n;
        const TypeParam expected = inside ? E::store(E::load(source[i]) * scale) : before[i];
        ASSERT_TRUE(same_bits(scaled[i], expected)) << "n=" << n << " shift=" << shift << " i=" << i;
      }
    }
  }
}

TYPED_TEST(ScaleInto, WeightedSumsAddInOrderAndTouchNothingElse) {
  using E = Element<TypeParam>;
  using Math = typename E::Math;
  const std::vector<Math> all_weights{Math{0.25F}, Math{0.5F}, Math{-1}, Math{3}};
  for (const std::size_t inputs : {1, 2, 4}) {
    for (const std::size_t n : kSizes) {
      for (const std::size_t shift : {0, 1, 3}) {
        const auto before = make_many<TypeParam>(n + shift + 2, 5);
        std::vector<std::vector<TypeParam>> sources;
        std::vector<const TypeParam*> pointers;
        for (std::size_t j = 0; j < inputs; ++j) {
          sources.push_back(make_many<TypeParam>(n + shift, 10 + static_cast<unsigned>(j)));
        }
        auto summed = before;
        for (std::size_t j = 0; j < inputs; ++j) {
          // The last of several is the destination itself.
          pointers.push_back((j > 0 && j + 1 == inputs ? summed.data() : sources[j].data()) + shift);
        }
        weightedSum<TypeParam>(summed.data() + shift, pointers, std::span(all_weights).first(inputs), n);
        for (std::size_t i = 0; i < summed.size(); ++i) {
          TypeParam expected = before[i];
          if (i >= shift && i < shift + n) {
            double sum = 0.0;
            for (std::size_t j = 0; j < inputs; ++j) {
              const auto& from = j > 0 && j + 1 == inputs ? before : sources[j];
              sum += static_cast<double>(E::load(from[i])) * static_cast<double>(all_weights[j]);
            }
            expected = E::store(static_cast<Math>(sum));
          }
          ASSERT_NEAR(static_cast<double>(E::load(summed[i])), static_cast<double>(E::load(expected)),
                      0.01 + 0.01 * std::abs(static_cast<double>(E::load(expected))))
              << "n=" << n << " shift=" << shift << " i=" << i;
        }
      }
    }
  }
}

#if TORCHEXT_X86_DISPATCH
// All 65,536 bit patterns in one run: subnormals, infinities, NaNs. The two ways may differ in a NaN's payload only.
template <class T>
void expect_same_way(const std::vector<T>& baseline, const std::vector<T>& wide) {
  for (std::size_t i = 0; i < baseline.size(); ++i) {
    if (std::isnan(Element<T>::load(baseline[i]))) {
      ASSERT_TRUE(std::isnan(Element<T>::load(wide[i]))) << i;
    } else {
      ASSERT_TRUE(same_bits(baseline[i], wide[i])) << i;
    }
  }
}

template <class T>
class BothWays : public testing::Test {};
using SixteenBits = testing::Types<Half, BFloat16>;
TYPED_TEST_SUITE(BothWays, SixteenBits);

TYPED_TEST(BothWays, AgreeOnEveryBitPattern) {
  if (!cpuHasAvx2()) {
    GTEST_SKIP() << "this processor has no AVX2";
  }
  std::vector<TypeParam> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].x = static_cast<std::uint16_t>(i);
  }
  std::vector<TypeParam> baseline(all.size());
  std::vector<TypeParam> wide(all.size());
  detail::scaleLoop(baseline.data(), all.data(), all.size(), 0.7F);
  detail::scaleAvx2(wide.data(), all.data(), all.size(), 0.7F);
  expect_same_way(baseline, wide);

  baseline = make_many<TypeParam>(all.size(), 5);
  wide = baseline;
  detail::sumLoop(baseline.data(), all.data(), all.size());
  detail::sumAvx2(wide.data(), all.data(), all.size());
  expect_same_way(baseline, wide);
}
#endif

}  // namespace
}  // namespace torchext::cpu
