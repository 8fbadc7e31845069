// What a token count leads to: kernels, tile size, grid. All tuned numbers live in plan.cpp.
#pragma once

#include <array>
#include <cstdint>

#include "cake/fused_moe.h"
#include "common/work_pool.h"

namespace cake {

enum class Architecture : uint8_t {
  kSm90,   // compute capability 9.0
  kSm100,  // 10.0 and 10.3
};

// A GPU as far as a plan depends on it.
struct Gpu {
  Architecture architecture;
  int32_t num_sms;
};

enum class Kernels : uint8_t {
  kDecode,   // sm_90, few pairs per expert: FC1 and FC2 in one launch, tiles of 8 pairs
  kPrefill,  // sm_90, many: warpgroup MMA, tiles of up to 64, 88 or 176 pairs
  kSm100,    // block-scaled MMA, tiles of up to 8 .. 128 pairs
};

// What the kernels are built for; launch.cu compares.
inline constexpr int32_t kDecodeTilePairs = 8;
inline constexpr int32_t kFinalizingCtas = 112;  // of the decode kernel that finalizes, at least
inline constexpr int32_t kShortPrefillTilePairs = 64;
inline constexpr int32_t kPrefillTilePairs = 88;
inline constexpr int32_t kWidePrefillTilePairs = 2 * kPrefillTilePairs;
inline constexpr std::array<int32_t, 5> kSm100TilePairs{8, 16, 32, 64, 128};

// Returns run.operator()<N>() for N = tile_pairs, one of kSm100TilePairs.
template <class Run>
Status with_sm100_tile_pairs(int32_t tile_pairs, const Run& run) {
  switch (tile_pairs) {
    case 8:
      return run.template operator()<8>();
    case 16:
      return run.template operator()<16>();
    case 32:
      return run.template operator()<32>();
    case 64:
      return run.template operator()<64>();
    default:
      return run.template operator()<128>();
  }
}

struct Plan {
  Kernels kernels;
  int32_t tile_pairs;      // most pairs of a tile
  int32_t num_ctas;        // of FC1 and FC2
  int32_t fc2_blocks;      // of 128 output columns of a launch of FC2; the last may have fewer
  int32_t fc2_tile_parts;  // items that FC2 makes of a tile
  bool fc2_finalizes;      // FC2 adds up the token's rows itself
  WorkPool fc2_pool;       // of blocks of kFc2BlockRows output columns of a tile
};

// Whether CAKE_BATCH_INVARIANT is 1; read once.
bool batch_invariant_by_environment();

// `batch_invariant`: a row's bits do not depend on the token count.
Plan make_plan(int32_t num_tokens, const Gpu& gpu, bool batch_invariant);

}  // namespace cake
