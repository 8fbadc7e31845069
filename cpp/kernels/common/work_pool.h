// Work cut into ranges of even size: all of it, or most of it with the rest left in a pool.
#pragma once

#include <cstdint>

#include "common/nvfp4.h"

namespace cake {

struct Range {
  int32_t begin, end;
};

// Range `index` of 0 .. items - 1 cut into `ranges` contiguous ones; the first ones have one item
// more where the sizes differ.
CAKE_HOST_DEVICE constexpr Range even_range(int32_t items, int32_t ranges, int32_t index) {
  const int32_t size = items / ranges;
  const int32_t longer = items - size * ranges;
  const int32_t begin = index * size + (index < longer ? index : longer);
  return {begin, begin + size + (index < longer ? 1 : 0)};
}

// Ranges of work that CTAs take one at a time while others wait for all of them.
struct RangeCounters {
  int32_t taken;  // and one for every CTA that found none
  int32_t done;
};

// How the blocks of a launch are given to its CTAs: the first ones are dealt out in equal ranges,
// the others claimed, a few at a time, by CTAs that have come to the end of their range.
struct WorkPool {
  int32_t part = 0;          // one block in so many is left in the pool; 0: none
  int32_t claim_blocks = 0;  // of one claim

  CAKE_HOST_DEVICE constexpr int32_t dealt(int32_t blocks) const {
    return part == 0 ? blocks : blocks - blocks / part;
  }

  // Blocks of claim 0, 1, ..; empty: nothing is left.
  CAKE_HOST_DEVICE constexpr Range claimed(int32_t blocks, int32_t claim) const {
    const int32_t begin = dealt(blocks) + claim * claim_blocks;
    const int32_t end = begin + claim_blocks;
    return {begin, end < blocks ? end : blocks};
  }
};

}  // namespace cake
