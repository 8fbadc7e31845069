// Weighted sum of a token's expert rows: float32, slots in ascending order by fused multiply-add,
// empty slots left out, BF16 result. One thread has 8 columns of one token; the threads of all
// tokens are numbered through, so that none idles at any number of columns.
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
  int32_t num_tokens;
  int32_t columns;        // of the rows and of the part of the output; a multiple of 128
  int32_t output_stride;  // elements
};

// The slot's weight as bfloat16, widened.
__device__ __forceinline__ float slot_weight(const Params& params, int32_t pair) {
  if (params.weights_are_float32) {
    return __bfloat162float(
        __float2bfloat16_rn(__ldcg(static_cast<const float*>(params.topk_weights) + pair)));
  }
  return __bfloat162float(__ldcg(static_cast<const __nv_bfloat16*>(params.topk_weights) + pair));
}

__device__ __forceinline__ bool slot_used(const Params& params, int32_t pair) {
  const int64_t id = params.ids_are_int64
                         ? __ldcg(static_cast<const int64_t*>(params.topk_ids) + pair)
                         : __ldcg(static_cast<const int32_t*>(params.topk_ids) + pair);
  return id >= 0 && id < params.num_experts;
}

__global__ void __launch_bounds__(kThreads) cake_finalize(const __grid_constant__ Params params) {
  ptx::griddepcontrol_launch_dependents();
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t token_threads = params.columns / kColumns;  // at least 16
  const int32_t thread = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  const int32_t token = thread / token_threads;
  const int32_t column = thread % token_threads * kColumns;
  // A warp has threads of two tokens at most: lanes 0 .. 15 look up the slots of the first, the
  // others those of the second. Ids and weights are the caller's: ordered before routing, which
  // ended before FC2 began; read past L1, which may hold older ones.
  const int32_t first_token = (thread - lane) / token_threads;
  const int32_t looked_up = first_token + lane / kTopK;
  float weight = 0.0f;
  bool slot_is_used = false;
  if (looked_up < params.num_tokens) {
    weight = slot_weight(params, looked_up * kTopK + lane % kTopK);
    slot_is_used = slot_used(params, looked_up * kTopK + lane % kTopK);
  }
  const int32_t own_lanes = (token - first_token) * kTopK;
  const uint32_t used = __ballot_sync(0xFFFFFFFFu, slot_is_used) >> own_lanes;
  float weights[kTopK];
#pragma unroll
  for (int slot = 0; slot < kTopK; ++slot) {
    weights[slot] = __shfl_sync(0xFFFFFFFFu, weight, own_lanes + slot);
  }
  ptx::griddepcontrol_wait();
  if (token >= params.num_tokens) {
    return;
  }
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
