#include <gtest/gtest.h>

#include <vector>

#include "common/work_pool.h"

namespace cake {
namespace {

TEST(WorkPool, RangesOfEqualSizeCoverTheItemsInOrder) {
  for (const int32_t items : {0, 1, 5, 131, 132, 133, 3360, 25088}) {
    for (const int32_t ranges : {1, 3, 132, 148}) {
      int32_t end = 0;
      for (int32_t i = 0; i < ranges; ++i) {
        const Range range = even_range(items, ranges, i);
        ASSERT_EQ(range.begin, end);
        end = range.end;
        ASSERT_GE(end - range.begin, items / ranges);
        ASSERT_LE(end - range.begin, (items + ranges - 1) / ranges);
      }
      ASSERT_EQ(end, items);
    }
  }
}

TEST(WorkPool, DealtRangesAndClaimsGiveEveryBlockToOneCta) {
  constexpr int32_t kCtas = 132;
  for (const int32_t part : {0, 4, 8}) {
    for (const int32_t claim_blocks : {1, 2}) {
      const WorkPool pool{part, part == 0 ? 0 : claim_blocks};
      for (const int32_t blocks : {0, 1, 3, 7, 28, 56, 448, 3360, 25088}) {
        std::vector<int32_t> times(blocks);
        const auto take = [&](Range range) {
          for (int32_t block = range.begin; block < range.end; ++block) {
            ++times.at(block);
          }
          return range.begin < range.end;
        };
        for (int32_t cta = 0; cta < kCtas; ++cta) {
          take(even_range(pool.dealt(blocks), kCtas, cta));
        }
        int32_t claims = 0;
        while (take(pool.claimed(blocks, claims))) {
          ++claims;
        }
        ASSERT_EQ(times, std::vector<int32_t>(blocks, 1)) << part << " " << blocks;
        const int32_t left = part == 0 ? 0 : blocks / part;
        ASSERT_EQ(claims, (left + claim_blocks - 1) / claim_blocks);
        ASSERT_FALSE(take(pool.claimed(blocks, claims + kCtas)));
      }
    }
  }
}

}  // namespace
}  // namespace cake
