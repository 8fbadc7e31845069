// What every FC1 kernel reads and writes.
#pragma once

#include <cstdint>

#include "common/tile.h"

namespace cake::fc1 {

struct Params {
  const uint8_t* __restrict__ w13;       // [E, 768, 1792] prepared codes
  const uint8_t* __restrict__ w13_sf;    // [E, 6, 56, 512] e4m3, 128x4 blocks
  const uint8_t* __restrict__ input;     // [T, 1792] codes; not for the prefill kernel
  const uint8_t* __restrict__ input_sf;  // [T, 224] e4m3, linear; not for the prefill kernel
  const uint8_t* __restrict__ halves;    // half [T, 3584], for the prefill kernel
  const Tile* __restrict__ tiles;
  const int32_t* __restrict__ num_tiles;       // [1]
  const int32_t* __restrict__ expert_pairs;    // [P] pair ids
  const float* __restrict__ fc1_alpha;         // [E]
  const float* __restrict__ fc2_input_scale;   // [E]
  const float* __restrict__ situ_beta;         // [E]
  const float* __restrict__ situ_linear_beta;  // [E]
  // Out [P, 192] codes, [P, 24] e4m3; row = pair id, on sm_100 position in expert_pairs.
  uint8_t* __restrict__ packed;
  uint8_t* __restrict__ sf;
  int32_t num_tokens;  // T
};

}  // namespace cake::fc1
