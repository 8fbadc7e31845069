// What every FC2 kernel reads and writes.
#pragma once

#include <cstdint>

#include "common/slots.h"
#include "common/tile.h"
#include "common/work_pool.h"

namespace cake::fc2 {

struct Params {
  const uint8_t* __restrict__ w2;     // [E, 3584, 192] prepared codes
  const uint8_t* __restrict__ w2_sf;  // [E, 28, 6, 512] e4m3, 128x4 blocks
  // [P, 192] codes, [P, 24] e4m3; row = pair id, on sm_100 position in expert_pairs.
  const uint8_t* __restrict__ input;
  const uint8_t* __restrict__ input_sf;
  const Tile* __restrict__ tiles;
  const int32_t* __restrict__ num_tiles;     // [1]
  const int32_t* __restrict__ expert_pairs;  // [P] pair ids
  const float* __restrict__ fc2_alpha;       // [E]
  uint16_t* __restrict__ rows;               // out bf16 [P, 128 * num_blocks], row = pair id
  int32_t first_block;  // blocks of 128 output columns: first_block .. + num_blocks - 1
  int32_t num_blocks;
  int32_t num_pairs;      // P
  int32_t tile_parts;     // items of a tile, for the prefill kernel
  WorkPool pool;          // of blocks, for common/work_pool.cuh
  int32_t* work_counter;  // [1], 0 before the launch; null without a pool
  // For the decode kernel of one token.
  Slots slots;
  uint16_t* __restrict__ output;  // out bf16 [3584]
};

}  // namespace cake::fc2
