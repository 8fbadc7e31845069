// Work over blocks of output columns: most of it dealt out in advance, the rest claimed.
//
// Blocks are numbered through, num_blocks of each tile, tile by tile. Every CTA is dealt one
// contiguous range of equal size. When the launch has a counter (the pooled token counts), only
// three quarters are dealt; the rest is the pool, of which a CTA that has come to the end of its
// range claims a few blocks at a time by an atomic addition. What a block gives does not depend on
// who computes it. Routing sets the counter to 0 in every call, so one launch of a call may claim.
#pragma once

#include <cstdint>

#include "common/pipeline.cuh"
#include "common/tile.cuh"

namespace cake {

struct WorkPool {
  int32_t* counter;  // claims so far; null: everything is dealt
  int32_t blocks;
  int32_t claim_blocks;

  __device__ __forceinline__ int32_t dealt() const {
    return counter == nullptr ? blocks : blocks - blocks / 4;
  }

  // This CTA's; the first ones have one block more where the sizes differ.
  __device__ __forceinline__ Range dealt_range() const {
    const auto ctas = static_cast<int32_t>(gridDim.x);
    const auto cta = static_cast<int32_t>(blockIdx.x);
    const int32_t size = dealt() / ctas;
    const int32_t longer = dealt() - size * ctas;
    const int32_t begin = cta * size + min(cta, longer);
    return {begin, begin + size + (cta < longer ? 1 : 0)};
  }

  // The number of a claim. The answer comes from L2: ask early, use it late.
  __device__ __forceinline__ int32_t claim() const {
    return counter == nullptr ? 0 : atomicAdd(counter, 1);
  }

  // Empty: nothing is left.
  __device__ __forceinline__ Range claimed_range(int32_t claim) const {
    const int32_t begin = dealt() + claim * claim_blocks;
    return {begin, min(begin + claim_blocks, blocks)};
  }
};

// Consecutive blocks of one tile.
struct TileBlocks {
  Tile tile;  // count 0: no work is left
  int32_t begin, end;
};

// One CTA's work in order; one thread walks it.
class WorkCursor {
 public:
  __device__ __forceinline__ WorkCursor(const Tile* tiles, int32_t num_blocks, const WorkPool& pool)
      : pool_(pool),
        tiles_(tiles),
        num_blocks_(num_blocks),
        range_(pool.dealt_range()),
        claim_(pool.claim()) {}

  // Waits neither for the tile that it looks up nor for the claim that it makes.
  __device__ __forceinline__ TileBlocks next() {
    if (range_.begin >= range_.end) {
      range_ = pool_.claimed_range(claim_);
      if (range_.begin >= range_.end) {
        return {};
      }
      claim_ = pool_.claim();
    }
    const int32_t tile = range_.begin / num_blocks_;
    const int32_t begin = range_.begin - tile * num_blocks_;
    const int32_t end = min(num_blocks_, begin + range_.end - range_.begin);
    range_.begin += end - begin;
    return {load_tile(tiles_ + tile), begin, end};
  }

 private:
  const WorkPool pool_;
  const Tile* const tiles_;
  const int32_t num_blocks_;
  Range range_;    // what is left of it
  int32_t claim_;  // of the range after it
};

}  // namespace cake
