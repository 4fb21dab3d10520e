#include "core/kfac/per_sample_choice.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace torchext::core {
namespace {

using Chosen = std::vector<bool>;

// Of which each rank makes all where there are no rows.
RowLayer whole(std::size_t width, std::size_t rows, std::size_t bytes, double seconds) {
  return {width, width, rows, bytes, seconds, seconds};
}

TEST(PerSampleChoice, ShareIsThatOfTheMultiplications) {
  // 64 (1024^2 + 1024^2 + 1024^2) of 2 1024^3.
  EXPECT_DOUBLE_EQ(shareOfRows(1024, 1024, 64), 64 * 3.0 / (2 * 1024));
  // 5 (9 + 16 + 12) of 12 * 7.
  EXPECT_DOUBLE_EQ(shareOfRows(3, 4, 5), 5 * 37.0 / 84);
  EXPECT_EQ(shareOfRows(100, 100, 0), 0);
}

TEST(PerSampleChoice, FewRowsOfWideLayersAreChosen) {
  const AlphaBeta nothing;
  EXPECT_EQ(chooseRows({whole(1024, 64, 0, 5e-3)}, nothing, false), Chosen{true});
  EXPECT_EQ(chooseRows({whole(1024, 680, 0, 5e-3)}, nothing, false), Chosen{false});  // as many multiplications
  EXPECT_EQ(chooseRows({whole(32, 2, 0, 20e-6)}, nothing, false), Chosen{false});     // cheap as it is
  EXPECT_EQ(chooseRows({whole(1024, 0, 0, 5e-3)}, nothing, false), Chosen{false});    // none
  EXPECT_TRUE(chooseRows({}, nothing, false).empty());
}

TEST(PerSampleChoice, WhatGatheringCostsCounts) {
  const RowLayer layer = whole(1024, 64, 128 << 10, 5e-3);
  EXPECT_EQ(chooseRows({layer}, {0, 1e-8}, false), Chosen{true});    // 1.3 ms of 4.2 saved
  EXPECT_EQ(chooseRows({layer}, {0, 4e-8}, false), Chosen{false});   // 5.2 ms
  EXPECT_EQ(chooseRows({layer}, {10e-3, 0}, false), Chosen{false});  // to begin with
  EXPECT_EQ(chooseRows({layer, layer, layer}, {10e-3, 0}, false), Chosen(3, true));
}

TEST(PerSampleChoice, ALayerIsChosenForItself) {
  EXPECT_EQ(chooseRows({whole(1024, 64, 1000, 5e-3), whole(100, 64, 1000, 10e-6), whole(512, 64, 1000, 1e-3)},
                       {1e-4, 1e-9}, false),
            (Chosen{true, false, true}));
}

TEST(PerSampleChoice, AShareIsWhatRowsAreComparedWith) {
  RowLayer layer = whole(1024, 128, 0, 5e-3);  // by rows 0.94 ms, and what comparing takes
  for (const auto& [otherwise, pays] :
       std::vector<std::pair<double, bool>>{{5e-3, true}, {2.5e-3, true}, {1.2e-3, false}}) {
    layer.otherwise = otherwise;
    EXPECT_EQ(chooseRows({layer}, {}, false), Chosen{pays}) << otherwise;
  }
}

TEST(PerSampleChoice, LayersThatBelongTogetherAreChosenTogether) {
  const auto together = [](RowLayer layer) {
    layer.together = true;
    return layer;
  };
  const RowLayer wide = together(whole(1024, 64, 0, 5e-3));
  const RowLayer small = together(whole(32, 64, 0, 20e-6));  // would not pay for itself
  const RowLayer other = whole(1024, 64, 0, 5e-3);
  EXPECT_EQ(chooseRows({wide, small, other}, {}, false), Chosen(3, true));
  EXPECT_EQ(chooseRows({small, small, other}, {}, false), (Chosen{false, false, true}));
  const RowLayer without = together(whole(1024, 0, 0, 5e-3));
  EXPECT_EQ(chooseRows({wide, without, other}, {}, false), (Chosen{false, false, true}));
  const RowLayer costly = together(whole(1024, 2000, 0, 5e-3));  // loses more than the other gains
  EXPECT_EQ(chooseRows({wide, costly}, {}, false), Chosen(2, false));
}

TEST(PerSampleChoice, WhatIsWrittenAheadIsWorthALayerThatWouldCostLessWithout) {
  const RowLayer wide = whole(1024, 64, 0, 5e-3);    // 0.5 ms of writing
  const RowLayer small = whole(32, 64, 0, 20e-6);    // loses 0.05 ms
  const RowLayer costly = whole(256, 300, 0, 1e-3);  // 0.8 ms
  const RowLayer without = whole(32, 0, 0, 20e-6);
  EXPECT_EQ(chooseRows({wide, small}, {}, true), Chosen(2, true));
  EXPECT_EQ(chooseRows({wide, small}, {}, false), (Chosen{true, false}));
  EXPECT_EQ(chooseRows({wide, costly}, {}, true), (Chosen{true, false}));
  EXPECT_EQ(chooseRows({wide, wide, wide, costly}, {}, true), Chosen(4, true));
  EXPECT_EQ(chooseRows({wide, small, without}, {}, true), (Chosen{true, false, false}));  // one has none
  EXPECT_EQ(chooseRows({small, small}, {}, true), Chosen(2, false));
}

}  // namespace
}  // namespace torchext::core
