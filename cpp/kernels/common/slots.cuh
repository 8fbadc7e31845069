// Weighted sum of a token's expert rows: float32, slots in ascending order by fused multiply-add,
// empty slots left out, BF16 result.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/slots.h"

namespace cake {

inline constexpr int kTopK = 16;

// FC1 and the decode kernel release what follows only after their own wait: routing, and so all
// before the call that ids and weights may come from, has ended when FC2 or finalize begins. They
// are read past L1, which may hold older ones.

// The expert of a pair, -1 for an empty slot.
__device__ __forceinline__ int32_t slot_expert(const Slots& slots, int32_t pair) {
  const int64_t id = slots.ids_are_int64
                         ? __ldcg(static_cast<const int64_t*>(slots.topk_ids) + pair)
                         : __ldcg(static_cast<const int32_t*>(slots.topk_ids) + pair);
  return id >= 0 && id < slots.num_experts ? static_cast<int32_t>(id) : -1;
}

// A pair's slot.
struct RoutedSlot {
  float weight = 0.0f;  // as bfloat16, widened
  bool used = false;

  RoutedSlot() = default;
  __device__ __forceinline__ RoutedSlot(const Slots& slots, int32_t pair) {
    if (slots.weights_are_float32) {
      weight = __bfloat162float(
          __float2bfloat16_rn(__ldcg(static_cast<const float*>(slots.topk_weights) + pair)));
    } else {
      weight =
          __bfloat162float(__ldcg(static_cast<const __nv_bfloat16*>(slots.topk_weights) + pair));
    }
    used = slot_expert(slots, pair) >= 0;
  }
};

// The slots of one token, from the 16 lanes that looked them up, the first of which is `first`.
// Called by whole warps.
struct TokenSlots {
  float weights[kTopK];
  uint32_t used;  // bit s: slot s

  __device__ __forceinline__ TokenSlots(const RoutedSlot& looked_up, int32_t first)
      : used(__ballot_sync(0xFFFFFFFFu, looked_up.used) >> first) {
#pragma unroll
    for (int slot = 0; slot < kTopK; ++slot) {
      weights[slot] = __shfl_sync(0xFFFFFFFFu, looked_up.weight, first + slot);
    }
  }

  __device__ __forceinline__ bool is_used(int slot) const { return (used >> slot & 1) != 0; }
};

// Adds slot `slot`'s row, two bf16 columns in a word, to the sums of its token.
__device__ __forceinline__ void add_row(float weight, uint32_t columns, float& low, float& high) {
  low = __fmaf_rn(weight, __uint_as_float(columns << 16), low);
  high = __fmaf_rn(weight, __uint_as_float(columns & 0xFFFF0000u), high);
}

}  // namespace cake
