// Reads of what routing wrote, also by kernels that have not waited for it: past L1, which may hold
// what was there before.
#pragma once

#include <cstdint>

#include "common/tile.h"

namespace cake {

__device__ __forceinline__ Tile load_tile(const Tile* tile) {
  const int4 words = __ldcg(reinterpret_cast<const int4*>(tile));
  return {words.x, words.y, words.z, words.w};
}

__device__ __forceinline__ int32_t load_num_tiles(const int32_t* num_tiles) {
  return __ldcg(num_tiles);
}

}  // namespace cake
