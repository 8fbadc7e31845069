// What routing reads and writes.
#pragma once

#include <cstdint>

#include "common/tile.h"
#include "common/work_pool.h"

namespace cake::routing {

inline constexpr int kThreads = 1024;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kExperts = 896;
inline constexpr int kLargeCluster = 8;

struct Params {
  const void* __restrict__ topk_ids;  // int32 or int64 [P]
  bool ids_are_int64;
  int32_t num_pairs;                           // P
  int32_t tile_pairs;                          // most pairs of a tile
  int32_t* __restrict__ expert_pairs;          // out [P] pair ids by expert, token, slot
  Tile* __restrict__ tiles;                    // out, by expert
  int32_t* __restrict__ num_tiles;             // out [1]
  int32_t* __restrict__ work_counter;          // out [1] or null: seeded with 0
  RangeCounters* __restrict__ range_counters;  // out [1]: seeded with 0

  const uint16_t* __restrict__ input;     // bf16 [T, 16 * groups], input_stride elements a row
  const float* __restrict__ input_scale;  // [1]
  uint2* __restrict__ packed;             // out [T, groups]
  uint8_t* __restrict__ sf;               // out [T, groups]
  // Out or null: half [T, 16 * groups], dequantized, in the order of common/grouped_mma_sm90.cuh.
  uint32_t* __restrict__ halves;
  int64_t input_stride;  // elements
  int32_t num_groups;    // T * groups
  int32_t groups;        // of a token
};

// An id as it is read: an int32 and 0, or the words of an int64. kExperts beyond the end.
__device__ __forceinline__ uint2 load_id(const Params& params, int32_t pair, int32_t end) {
  uint2 id{kExperts, 0};
  if (pair < end) {
    const auto* const words = static_cast<const uint32_t*>(params.topk_ids);
    const int32_t first = params.ids_are_int64 ? 2 * pair : pair;
    id.x = words[first];
    if (params.ids_are_int64) {
      id.y = words[first + 1];
    }
  }
  return id;
}

// The expert of a pair, or kExperts for an empty slot.
__device__ __forceinline__ int32_t expert_of(uint2 id) {
  return id.y == 0 ? static_cast<int32_t>(min(id.x, uint32_t{kExperts})) : kExperts;
}

// Most experts have no more than one tile: the division is for the others.
__device__ __forceinline__ int32_t tiles_of(const Params& params, int32_t pairs) {
  return pairs > params.tile_pairs ? (pairs + params.tile_pairs - 1) / params.tile_pairs
                                   : min(pairs, 1);
}

// Writes the tiles of an expert: `size` pairs and the first `longer` one more.
__device__ __forceinline__ void write_tiles(const Params& params, int32_t expert, int32_t pairs,
                                            int32_t first_pair, int32_t num_tiles,
                                            int32_t first_tile, int32_t begin, int32_t step) {
  const int32_t size = num_tiles > 1 ? pairs / num_tiles : pairs;
  const int32_t longer = pairs - size * num_tiles;
  for (int32_t i = begin; i < num_tiles; i += step) {
    params.tiles[first_tile + i] = {expert, first_pair + i * size + min(i, longer),
                                    size + (i < longer ? 1 : 0), 0};
  }
}

__device__ __forceinline__ void write_totals(const Params& params, int32_t num_tiles) {
  *params.num_tiles = num_tiles;
  if (params.work_counter != nullptr) {
    *params.work_counter = 0;
  }
  *params.range_counters = {};
}

}  // namespace cake::routing
