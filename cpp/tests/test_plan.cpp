#include <gtest/gtest.h>

#include "plan.h"
#include "workspace.h"

namespace cake {
namespace {

TEST(Plan, ChangesKernelsOnceAsTokensGrow) {
  int changes = 0;
  for (int32_t tokens = 1; tokens <= kMaxTokens; ++tokens) {
    const Plan plan = make_plan(tokens, 132);
    EXPECT_EQ(plan.tile_pairs,
              plan.kernels == Kernels::kDecode ? kDecodeTilePairs : kPrefillTilePairs);
    EXPECT_EQ(plan.num_ctas, 132);
    changes += tokens > 1 && plan.kernels != make_plan(tokens - 1, 132).kernels;
  }
  EXPECT_EQ(make_plan(1, 132).kernels, Kernels::kDecode);
  EXPECT_EQ(changes, 1);
}

TEST(Plan, EveryRegionHoldsWhatItsKernelsWrite) {
  for (int32_t tokens = 1; tokens <= kMaxTokens; tokens += tokens < 3000 ? 1 : 97) {
    const Workspace layout(kKimiK3, tokens);
    const int64_t pairs = int64_t{tokens} * kKimiK3.top_k;
    const int64_t part = fc2_blocks_per_part(kKimiK3, tokens);
    ASSERT_LE(pairs * part * kFc2BlockRows * 2, layout.fc2_rows.bytes) << tokens;
    if (make_plan(tokens, 132).kernels ==
        Kernels::kPrefill) {  // the input as half lies there first
      ASSERT_LE(int64_t{tokens} * kKimiK3.hidden * 2, layout.fc2_rows.bytes) << tokens;
    }
    // The most tiles: every expert has one pair more than a whole number of tiles.
    const int64_t tile = make_plan(tokens, 132).tile_pairs;
    const int64_t experts = std::min<int64_t>(kKimiK3.num_experts, pairs);
    const int64_t most = experts + (pairs - experts) / tile;
    ASSERT_LE(most * 16, layout.tiles.bytes) << tokens;
  }
}

}  // namespace
}  // namespace cake
