#include <gtest/gtest.h>

#include <algorithm>

#include "plan.h"
#include "workspace.h"

namespace cake {
namespace {

constexpr Gpu kH200{Architecture::kSm90, 132};
constexpr Gpu kB200{Architecture::kSm100, 148};

// An item of FC2, a part of FC1's tile, fits into its shared memory.
void expect_prefill_tiles(const Plan& plan, int32_t tokens) {
  ASSERT_EQ(plan.kernels, Kernels::kPrefill) << tokens;
  ASSERT_LE(plan.tile_pairs, plan.fc2_tile_parts * kPrefillTilePairs) << tokens;
}

TEST(Plan, ChangesKernelsOnceAsTokensGrowAndThenTheSizeOfTiles) {
  int changes = 0;
  int widened = 0;
  for (int32_t tokens = 1; tokens <= kMaxTokens; ++tokens) {
    const Plan plan = make_plan(tokens, kH200, false);
    EXPECT_EQ(plan.num_ctas, 132);
    EXPECT_EQ(plan.fc2_finalizes, tokens == 1);
    if (plan.kernels == Kernels::kDecode) {
      EXPECT_EQ(plan.tile_pairs, kDecodeTilePairs);
    } else {
      expect_prefill_tiles(plan, tokens);
    }
    const Plan before = make_plan(std::max(tokens - 1, 1), kH200, false);
    changes += plan.kernels != before.kernels;
    widened += plan.tile_pairs > before.tile_pairs;
  }
  EXPECT_EQ(make_plan(1, kH200, false).kernels, Kernels::kDecode);
  EXPECT_EQ(changes, 1);
  EXPECT_EQ(widened, 3);
  EXPECT_EQ(make_plan(kChunkTokens, kH200, false).tile_pairs, kWidePrefillTilePairs);
}

TEST(Plan, OneTokenIsFinalizedByTheDecodeKernelWhereThereAreCtasForAllColumns) {
  for (const int32_t num_sms : {1, 60, 111, 112, 132}) {
    const Plan plan = make_plan(1, {Architecture::kSm90, num_sms}, false);
    EXPECT_EQ(plan.kernels, Kernels::kDecode);
    EXPECT_EQ(plan.fc2_finalizes, num_sms >= kKimiK3.hidden / 32) << num_sms;
  }
}

TEST(Plan, EveryRegionHoldsWhatItsKernelsWrite) {
  for (int32_t tokens = 1; tokens <= kMaxTokens; tokens += tokens < 3000 ? 1 : 97) {
    const int32_t chunk = tokens_per_chunk(tokens);
    ASSERT_LE(Workspace(kKimiK3, chunk).total_bytes, workspace_bytes(kKimiK3, tokens)) << tokens;
    const Workspace layout(kKimiK3, chunk);
    const int64_t pairs = int64_t{chunk} * kKimiK3.top_k;
    // With the prefill kernels, the input as half lies there first.
    ASSERT_LE(int64_t{chunk} * kKimiK3.hidden * 2, layout.fc2_rows.bytes) << tokens;
    // The most tiles: every expert has one pair more than a whole number of tiles.
    for (const Gpu& gpu : {kH200, kB200}) {
      const Plan plan = make_plan(chunk, gpu, false);
      ASSERT_LE(pairs * plan.fc2_blocks * kFc2BlockRows * 2, layout.fc2_rows.bytes) << tokens;
      if (is_pooled(tokens)) {
        ASSERT_EQ(plan.fc2_blocks, kKimiK3.hidden / kFc2BlockRows) << tokens;
      }
      const int64_t tile = plan.tile_pairs;
      const int64_t experts = std::min<int64_t>(kKimiK3.num_experts, pairs);
      const int64_t most = experts + (pairs - experts) / tile;
      ASSERT_LE(most * 16, layout.tiles.bytes) << tokens;
    }
  }
}

TEST(Plan, BatchInvarianceTakesTheSameKernelsAtEveryTokenCount) {
  for (int32_t tokens = 1; tokens <= kMaxTokens; ++tokens) {
    expect_prefill_tiles(make_plan(tokens, kH200, true), tokens);
    EXPECT_FALSE(make_plan(tokens, kH200, true).fc2_finalizes) << tokens;
  }
}

TEST(Plan, Sm100HasOneTileOfAnExpertUpTo64TokensAndTilesThatOnlyGrow) {
  int32_t before = 0;
  for (int32_t tokens = 1; tokens <= kMaxTokens; ++tokens) {
    for (const bool batch_invariant : {false, true}) {
      const Plan plan = make_plan(tokens, kB200, batch_invariant);
      ASSERT_EQ(plan.kernels, Kernels::kSm100) << tokens;
      ASSERT_EQ(plan.num_ctas, kB200.num_sms);
      ASSERT_GE(plan.tile_pairs, std::min(tokens, 64)) << tokens;
      ASSERT_GE(plan.tile_pairs, before) << tokens;
      ASSERT_NE(std::find(kSm100TilePairs.begin(), kSm100TilePairs.end(), plan.tile_pairs),
                kSm100TilePairs.end());
      before = plan.tile_pairs;
    }
  }
  EXPECT_EQ(before, kSm100TilePairs.back());
}

TEST(Plan, PoolComesFromTheSmsAt8And16TokensAndIsFixedAbove) {
  for (int32_t tokens = 1; tokens <= kMaxTokens; ++tokens) {
    for (const Architecture architecture : {Architecture::kSm90, Architecture::kSm100}) {
      int32_t before = kFc2BlockRows;
      for (const int32_t num_sms : {78, 114, 132, 148, 160}) {
        const WorkPool pool = make_plan(tokens, {architecture, num_sms}, false).fc2_pool;
        ASSERT_EQ(pool.part > 0, is_pooled(tokens)) << tokens;
        ASSERT_EQ(pool.claim_blocks > 0, is_pooled(tokens)) << tokens;
        ASSERT_LE(pool.claim_blocks, before) << tokens;  // more SMs, smaller claims
        if (pool.part > 0 && tokens > 16) {
          ASSERT_EQ(pool.claim_blocks, 2) << tokens;
        }
        before = pool.claim_blocks;
      }
    }
  }
  EXPECT_EQ(make_plan(8, kH200, false).fc2_pool.claim_blocks, 1);
  EXPECT_EQ(make_plan(16, kH200, false).fc2_pool.claim_blocks, 2);
  EXPECT_EQ(make_plan(16, {Architecture::kSm100, 160}, false).fc2_pool.claim_blocks, 1);
}

TEST(Plan, TextNamesTheKernelsOfTheGpu) {
  EXPECT_NE(plan_text(1, false, 9).find(R"("kernels": "decode", "tile_pairs": 8)"),
            std::string::npos);
  EXPECT_NE(plan_text(4096, false, 10).find(R"("kernels": "sm100", "tile_pairs": 128)"),
            std::string::npos);
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
