// A CTA's work over blocks of output columns: a range that it is dealt, then claims from the pool.
//
// Blocks are numbered through, num_blocks of each tile, tile by tile. Where the launch has a pool
// (the pooled token counts), a CTA at the end of its range claims by an atomic addition to a
// counter. What a block gives does not depend on who computes it. Routing sets the counter to 0 in
// every call, so one launch of a call may claim. In the end the counter is the number of claims
// that the pool holds, and one more of each CTA, which found nothing.
#pragma once

#include <cstdint>

#include "common/pipeline.cuh"
#include "common/tile.cuh"
#include "common/work_pool.h"

namespace cake {

// Consecutive blocks of one tile.
struct TileBlocks {
  Tile tile;  // count 0: no work is left
  int32_t begin, end;
};

// One CTA's work in order; one thread walks it.
class WorkCursor {
 public:
  // `claims`: the counter; not used without a pool.
  __device__ __forceinline__ WorkCursor(const Tile* tiles, int32_t num_tiles, int32_t num_blocks,
                                        const WorkPool& pool, int32_t* claims)
      : tiles_(tiles),
        num_blocks_(num_blocks),
        all_blocks_(num_tiles * num_blocks),
        pool_(pool),
        claims_(claims),
        range_(cta_range(pool.dealt(all_blocks_))),
        claim_(claim()) {}

  // After the end it may be called again.
  __device__ __forceinline__ TileBlocks next() {
    if (range_.begin >= range_.end) {
      range_ = pool_.claimed(all_blocks_, claim_);
      if (range_.begin >= range_.end) {
        return {};
      }
      claim_ = claim();
    }
    const int32_t tile = range_.begin / num_blocks_;
    const int32_t begin = range_.begin - tile * num_blocks_;
    const int32_t end = min(num_blocks_, begin + range_.end - range_.begin);
    range_.begin += end - begin;
    return {load_tile(tiles_ + tile), begin, end};
  }

 private:
  // The number of a claim. On sm_90 ptxas waits for it at once: it makes one atomic of those of a
  // warp.
  __device__ __forceinline__ int32_t claim() const {
    return pool_.part == 0 ? 0 : atomicAdd(claims_, 1);
  }

  const Tile* const tiles_;
  const int32_t num_blocks_;  // of a tile
  const int32_t all_blocks_;
  const WorkPool pool_;
  int32_t* const claims_;
  Range range_;    // what is left of it
  int32_t claim_;  // of the range after it
};

}  // namespace cake
