// What a token count leads to: kernels, tile size, grid. All tuned numbers live in plan.cpp.
#pragma once

#include <cstdint>

#include "cake/fused_moe.h"

namespace cake {

enum class Kernels : uint8_t {
  kDecode,   // few pairs per expert: bound by the weight stream, tiles of 8 pairs
  kPrefill,  // many: warpgroup MMA, tiles of up to 88 pairs
};

// What the kernels are built for; launch.cu compares.
inline constexpr int32_t kDecodeTilePairs = 8;
inline constexpr int32_t kPrefillTilePairs = 88;

struct Plan {
  Kernels kernels;
  int32_t tile_pairs;  // most pairs of a tile
  int32_t num_ctas;    // of FC1 and FC2
};

// Whether CAKE_BATCH_INVARIANT is 1; read once.
bool batch_invariant_by_environment();

// `batch_invariant`: the same kernels at every token count.
Plan make_plan(int32_t num_tokens, int32_t num_sms, bool batch_invariant);

}  // namespace cake
