#include <gtest/gtest.h>

#include <set>

#include "common/layout.h"
#include "npy.h"

namespace cake {
namespace {

using testing::golden;

TEST(Layout, Fc1RowsMatchGolden) {
  const auto source = golden<int16_t>("perm", "fc1_src_768");  // prepared row -> logical row
  for (int half = 0; half < 2; ++half) {
    for (int feature = 0; feature < 384; ++feature) {
      EXPECT_EQ(source[fc1_prepared_row(half, feature)], half * 384 + feature);
    }
  }
}

TEST(Layout, Fc2RowsMatchGolden) {
  const auto source = golden<int16_t>("perm", "fc2_src_3584");
  for (int n = 0; n < 3584; ++n) {
    EXPECT_EQ(fc2_logical_row(n), source[n]);
  }
}

TEST(Layout, ScaleOffsetsMatchGolden) {
  for (const auto& [rows, columns] : {std::pair{128, 8}, {768, 224}, {3584, 24}}) {
    const auto offsets =
        golden<int32_t>("sf_offset", "off_" + std::to_string(rows) + "x" + std::to_string(columns));
    for (int n = 0; n < rows; ++n) {
      for (int c = 0; c < columns; ++c) {
        ASSERT_EQ(scale_offset(n, c, columns), offsets[n * columns + c]) << n << ' ' << c;
      }
    }
  }
}

TEST(Layout, ScaleOffsetsAreABijection) {
  std::set<int64_t> seen;
  for (int n = 0; n < 256; ++n) {
    for (int c = 0; c < 12; ++c) {
      seen.insert(scale_offset(n, c, 12));
    }
  }
  EXPECT_EQ(seen.size(), 256u * 12);
  EXPECT_EQ(*seen.begin(), 0);
  EXPECT_EQ(*seen.rbegin(), 256 * 12 - 1);
}

}  // namespace
}  // namespace cake
