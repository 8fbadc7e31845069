#include <gtest/gtest.h>

#include "workspace.h"

namespace cake {
namespace {

TEST(Workspace, NeverShrinksAndStaysUnder300MegabytesForAllTokenCounts) {
  int64_t former = 0;
  for (int32_t tokens = 0; tokens <= kMaxTokens; ++tokens) {
    const int64_t bytes = workspace_bytes(kKimiK3, tokens);
    ASSERT_GE(bytes, former) << tokens;
    former = bytes;
  }
  EXPECT_LT(former, 300'000'000);
}

TEST(Workspace, RegionsAreAlignedAndDoNotOverlap) {
  for (const int32_t tokens : {1, 2, 7, 8, 33, 1024, kMaxTokens}) {
    const Workspace w(kKimiK3, tokens);
    int64_t end = 0;
    for (const Region* region : w.regions()) {
      EXPECT_EQ(region->offset % kWorkspaceAlignment, 0);
      EXPECT_GE(region->offset, end);
      EXPECT_EQ(region->bytes > 0, region != &w.work_counter || is_pooled(tokens));
      end = region->offset + region->bytes;
    }
    EXPECT_LE(end, w.total_bytes);
  }
}

TEST(Workspace, ConstantsLieAtTheSamePlaceForEveryTokenCount) {
  const Workspace one(kKimiK3, 1), most(kKimiK3, kMaxTokens);
  EXPECT_EQ(one.situ_beta.offset, most.situ_beta.offset);
  EXPECT_EQ(one.situ_linear_beta.offset, most.situ_linear_beta.offset);
}

}  // namespace
}  // namespace cake
