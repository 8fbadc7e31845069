// Weighted sum of a token's expert rows: float32, slots in ascending order by fused multiply-add,
// empty slots left out, BF16 result. One thread has 8 columns of one token.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "ptx/pdl.cuh"

namespace cake::finalize {

inline constexpr int kThreads = 64;
inline constexpr int kColumns = 8;  // of a thread: 16 bytes
inline constexpr int kTopK = 16;

struct Params {
  const void* __restrict__ topk_ids;      // int32 or int64 [T, 16]
  const void* __restrict__ topk_weights;  // bf16 or float32 [T, 16]
  bool ids_are_int64;
  bool weights_are_float32;
  int32_t num_experts;
  const uint16_t* __restrict__ rows;  // bf16 [P, row_columns]
  uint16_t* __restrict__ output;      // bf16 [T, output_stride]
  int32_t columns;                    // of the rows and of the part of the output to write
  int32_t output_stride;              // elements
};

// The slot's weight as bfloat16, widened.
__device__ __forceinline__ float slot_weight(const Params& params, int32_t pair) {
  if (params.weights_are_float32) {
    return __bfloat162float(
        __float2bfloat16_rn(static_cast<const float*>(params.topk_weights)[pair]));
  }
  return __bfloat162float(static_cast<const __nv_bfloat16*>(params.topk_weights)[pair]);
}

__device__ __forceinline__ bool slot_used(const Params& params, int32_t pair) {
  const int64_t id = params.ids_are_int64 ? static_cast<const int64_t*>(params.topk_ids)[pair]
                                          : static_cast<const int32_t*>(params.topk_ids)[pair];
  return id >= 0 && id < params.num_experts;
}

__global__ void __launch_bounds__(kThreads) cake_finalize(const __grid_constant__ Params params) {
  ptx::griddepcontrol_launch_dependents();
  const auto token = static_cast<int32_t>(blockIdx.x);
  const int32_t column =
      (static_cast<int32_t>(blockIdx.y) * kThreads + static_cast<int32_t>(threadIdx.x)) * kColumns;
  // Ids and weights are the caller's: ordered before routing, which ended before FC2 began.
  float weights[kTopK];
  uint32_t used = 0;
#pragma unroll
  for (int slot = 0; slot < kTopK; ++slot) {
    weights[slot] = slot_weight(params, token * kTopK + slot);
    used |= static_cast<uint32_t>(slot_used(params, token * kTopK + slot)) << slot;
  }
  if (column >= params.columns) {
    return;
  }
  ptx::griddepcontrol_wait();
  const uint16_t* row = params.rows + int64_t{token} * kTopK * params.columns + column;
  uint4 values[kTopK];
#pragma unroll
  for (int slot = 0; slot < kTopK; ++slot) {
    values[slot] = (used >> slot & 1) != 0
                       ? *reinterpret_cast<const uint4*>(row + int64_t{slot} * params.columns)
                       : uint4{};
  }
  float sums[kColumns] = {};
#pragma unroll
  for (int slot = 0; slot < kTopK; ++slot) {
    if ((used >> slot & 1) != 0) {
      const uint32_t words[4] = {values[slot].x, values[slot].y, values[slot].z, values[slot].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[2 * i] = __fmaf_rn(weights[slot], __uint_as_float(words[i] << 16), sums[2 * i]);
        sums[2 * i + 1] =
            __fmaf_rn(weights[slot], __uint_as_float(words[i] & 0xFFFF0000u), sums[2 * i + 1]);
      }
    }
  }
  uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(sums[2 * i], sums[2 * i + 1]);
    out[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  *reinterpret_cast<uint4*>(params.output + int64_t{token} * params.output_stride + column) =
      make_uint4(out[0], out[1], out[2], out[3]);
}

}  // namespace cake::finalize
