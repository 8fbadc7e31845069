// Position in a ring of stages: index and phase parity.
#pragma once

#include <cstdint>

namespace cake {

template <int kStages>
struct RingPosition {
  int32_t stage = 0;
  uint32_t parity = 0;  // of the phase that a consumer waits for; a producer waits for parity ^ 1

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// First work item of CTA `index` when `items` are cut into `ctas` equal contiguous ranges.
__device__ __forceinline__ int32_t range_begin(int32_t index, int32_t items, int32_t ctas) {
  return static_cast<int32_t>(static_cast<int64_t>(index) * items / ctas);
}

}  // namespace cake
