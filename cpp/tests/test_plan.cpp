#include <gtest/gtest.h>

#include "plan.h"
#include "workspace.h"

namespace cake {
namespace {

TEST(Plan, ChangesKernelsOnceAsTokensGrow) {
  int changes = 0;
  for (int32_t tokens = 1; tokens <= kMaxTokens; ++tokens) {
    const Plan plan = make_plan(tokens, 132, false);
    EXPECT_EQ(plan.tile_pairs,
              plan.kernels == Kernels::kDecode ? kDecodeTilePairs : kPrefillTilePairs);
    EXPECT_EQ(plan.num_ctas, 132);
    changes += tokens > 1 && plan.kernels != make_plan(tokens - 1, 132, false).kernels;
  }
  EXPECT_EQ(make_plan(1, 132, false).kernels, Kernels::kDecode);
  EXPECT_EQ(changes, 1);
}

TEST(Plan, EveryRegionHoldsWhatItsKernelsWrite) {
  for (int32_t tokens = 1; tokens <= kMaxTokens; tokens += tokens < 3000 ? 1 : 97) {
    const int32_t chunk = tokens_per_chunk(tokens);
    ASSERT_LE(Workspace(kKimiK3, chunk).total_bytes, workspace_bytes(kKimiK3, tokens)) << tokens;
    const Workspace layout(kKimiK3, chunk);
    const int64_t pairs = int64_t{chunk} * kKimiK3.top_k;
    const int64_t part = fc2_blocks_per_part(kKimiK3, chunk);
    ASSERT_LE(pairs * part * kFc2BlockRows * 2, layout.fc2_rows.bytes) << tokens;
    // With the prefill kernels, the input as half lies there first.
    ASSERT_LE(int64_t{chunk} * kKimiK3.hidden * 2, layout.fc2_rows.bytes) << tokens;
    // The most tiles: every expert has one pair more than a whole number of tiles.
    const int64_t tile = make_plan(chunk, 132, false).tile_pairs;
    const int64_t experts = std::min<int64_t>(kKimiK3.num_experts, pairs);
    const int64_t most = experts + (pairs - experts) / tile;
    ASSERT_LE(most * 16, layout.tiles.bytes) << tokens;
  }
}

TEST(Plan, BatchInvarianceTakesTheSameKernelsAtEveryTokenCount) {
  for (int32_t tokens = 1; tokens <= kMaxTokens; ++tokens) {
    const Plan plan = make_plan(tokens, 132, true);
    ASSERT_EQ(plan.kernels, Kernels::kPrefill) << tokens;
    ASSERT_EQ(plan.tile_pairs, kPrefillTilePairs) << tokens;
  }
}

TEST(Plan, ChunksCoverTheTokensAndAreNearlyEqual) {
  for (int32_t tokens = 1; tokens <= kMaxTokens; ++tokens) {
    const int32_t chunk = tokens_per_chunk(tokens);
    ASSERT_LE(chunk, kChunkTokens) << tokens;
    const int32_t chunks = (tokens + chunk - 1) / chunk;
    ASSERT_EQ(chunks, (tokens + kChunkTokens - 1) / kChunkTokens) << tokens;
    ASSERT_LT(int64_t{chunk} * chunks - tokens, chunks) << tokens;
  }
}

}  // namespace
}  // namespace cake
