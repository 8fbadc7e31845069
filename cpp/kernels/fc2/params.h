// What every FC2 kernel reads and writes.
#pragma once

#include <cstdint>

#include "common/tile.h"

namespace cake::fc2 {

struct Params {
  const uint8_t* __restrict__ w2;        // [E, 3584, 192] prepared codes
  const uint8_t* __restrict__ w2_sf;     // [E, 28, 6, 512] e4m3, 128x4 blocks
  const uint8_t* __restrict__ input;     // [P, 192] codes, row = pair id
  const uint8_t* __restrict__ input_sf;  // [P, 24] e4m3
  const Tile* __restrict__ tiles;
  const int32_t* __restrict__ num_tiles;     // [1]
  const int32_t* __restrict__ expert_pairs;  // [P] pair ids
  const float* __restrict__ fc2_alpha;       // [E]
  uint16_t* __restrict__ rows;               // out bf16 [P, 128 * num_blocks], row = pair id
  int32_t first_block;  // blocks of 128 output columns: first_block .. + num_blocks - 1
  int32_t num_blocks;
};

}  // namespace cake::fc2
