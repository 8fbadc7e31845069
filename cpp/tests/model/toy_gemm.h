// A small grouped product on the Blackwell instructions: the model's own test, and the pattern of
// the real kernels in one page.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/tile.h"
#include "kernel_launch.h"

namespace cake::toy {

inline constexpr int kK = 1024;
inline constexpr int kRows = 128;     // of a matrix of weights
inline constexpr int kMaxPairs = 16;  // of a tile

struct Params {
  CUtensorMap weights;       // [experts * kRows, kK / 2] codes, boxes of kRows rows
  CUtensorMap tokens;        // [num_tokens, kK / 2] codes, boxes of one row
  const uint8_t* weight_sf;  // blocks of 128 x 4, kK / 64 an expert
  const uint8_t* token_sf;   // [num_tokens, kK / 16]
  const Tile* tiles;
  const int32_t* token_ids;  // of pairs; tiles hold ranges of them
  float* out;                // [pairs, kRows]
  int32_t num_tiles, num_tokens;
};

Status launch_toy_gemm(const Params& params, int32_t num_ctas);

}  // namespace cake::toy
