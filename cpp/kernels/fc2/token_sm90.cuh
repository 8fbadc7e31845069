// FC2 and finalize of one token in one launch, sm_90a: its rows never go through memory.
//
// A CTA has 32 output columns; 112 CTAs have them all. Tile i is warp i's: 32 weight rows of the
// tile's expert (6144 B) and the scales of the 128 rows around them (3072 B), by two bulk copies.
// The products are left in shared memory, and 16 threads add up two columns each. What a warp
// multiplies, and how rows are added, is as in cake_fc2_decode_sm90 and cake_finalize, bit for bit.
//
//   full[w]   warp w's weights are there   (1 arrival + bytes)
//
// Weights, tile list and slots do not depend on FC1 (which released this grid only after routing
// had finished), so they are fetched before the wait.
#pragma once

#include <cstdint>

#include "common/bf16_pair.cuh"
#include "common/dequantize.cuh"
#include "common/slots.cuh"
#include "common/tile.cuh"
#include "fc2/decode_block_sm90.cuh"
#include "fc2/params.h"
#include "ptx/bulk_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/pdl.cuh"

namespace cake::fc2 {

struct Token : DecodeBlock {
  static constexpr int kWarps = kTopK;  // as many tiles as there can be
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kCtas = kHidden / kRows;
  static constexpr int kWeightBytes = kRows * kRowBytes;
};

struct TokenStorage {
  struct Weights {
    uint8_t codes[Token::kWeightBytes];
    uint8_t scales[Token::kScaleBytes];
  } weights[Token::kWarps];
  uint2 rows[kTopK][Token::kRows / 4];  // bf16, by slot
  uint64_t full[Token::kWarps];
};
static_assert(sizeof(TokenStorage) <= 232448, "shared memory exceeds 227 KB");

// Starts the copies of the weights of a warp's tile.
__device__ __forceinline__ void fetch_weights(const Params& params, TokenStorage& shared,
                                              int32_t expert, int32_t warp, int32_t lane) {
  if (lane == 0) {
    const uint32_t full = ptx::shared_address(&shared.full[warp]);
    TokenStorage::Weights& weights = shared.weights[warp];
    const uint64_t policy = ptx::createpolicy_evict_first();
    const int64_t rows =
        int64_t{expert} * Token::kHidden + static_cast<int32_t>(blockIdx.x) * Token::kRows;
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(full, sizeof(weights));
    ptx::cp_async_bulk(ptx::shared_address(weights.codes), params.w2 + rows * Token::kRowBytes,
                       sizeof(weights.codes), full, policy);
    ptx::cp_async_bulk(ptx::shared_address(weights.scales),
                       params.w2_sf + rows / Token::kScaleRows * Token::kScaleBytes,
                       sizeof(weights.scales), full, policy);
  }
  __syncwarp();  // the barrier exists
}

// Leaves the rows of the tile's pairs, which are slots of the token. `pair`: the lane's, that of
// column `lane / 4`; negative: none.
__device__ __forceinline__ void multiply_tile(const Params& params, TokenStorage& shared,
                                              int32_t expert, int32_t pair, int32_t warp,
                                              int32_t lane) {
  // Undoes the dequantization factors as well.
  const float alpha = params.fc2_alpha[expert] * kDequantizedSquare;
  const DecodePairs pairs(params, pair, lane);
  ptx::mbarrier_wait(ptx::shared_address(&shared.full[warp]), 0);
  const TokenStorage::Weights& weights = shared.weights[warp];
  const DecodeSums sums(weights.codes, weights.scales, static_cast<int32_t>(blockIdx.x) % 4, pairs,
                        lane);
#pragma unroll
  for (int j = 0; j < 2; ++j) {  // columns 2t + j of the tile
    const int32_t slot = __shfl_sync(0xFFFFFFFFu, pair, lane % 4 * 8 + 4 * j);
    if (slot >= 0) {
      shared.rows[slot][lane / 4] = sums.outputs(j, alpha);
    }
  }
}

// One warp: adds up the token's rows, 32 columns.
__device__ __forceinline__ void add_rows(const Params& params, const TokenStorage& shared,
                                         const RoutedSlot& own_slot, int32_t lane) {
  const TokenSlots slots(own_slot, 0);
  const int32_t word = lane % kTopK;
  float low = 0.0f;
  float high = 0.0f;
#pragma unroll
  for (int slot = 0; slot < kTopK; ++slot) {
    if (slots.is_used(slot)) {
      add_row(slots.weights[slot], reinterpret_cast<const uint32_t*>(shared.rows[slot])[word], low,
              high);
    }
  }
  if (lane < kTopK) {
    reinterpret_cast<uint32_t*>(params.output + blockIdx.x * Token::kRows)[word] =
        bf16_pair(low, high);
  }
}

__global__ void __launch_bounds__(Token::kThreads, 1)
    cake_fc2_token_sm90(const __grid_constant__ Params params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  __trap();  // the plan never picks this kernel elsewhere
#else
  extern __shared__ __align__(128) uint8_t fc2_token_storage[];
  TokenStorage& shared = *reinterpret_cast<TokenStorage*>(fc2_token_storage);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  ptx::griddepcontrol_launch_dependents();
  const Tile tile =
      warp < load_num_tiles(params.num_tiles) ? load_tile(params.tiles + warp) : Tile{};
  if (tile.count > 0) {
    fetch_weights(params, shared, tile.expert, warp, lane);
  }
  const int32_t pair =
      lane / 4 < tile.count ? __ldcg(params.expert_pairs + tile.first + lane / 4) : -1;
  const RoutedSlot own_slot =
      warp == 0 && lane < kTopK ? RoutedSlot(params.slots, lane) : RoutedSlot();
  ptx::griddepcontrol_wait();
  if (tile.count > 0) {
    multiply_tile(params, shared, tile.expert, pair, warp, lane);
  }
  __syncthreads();
  if (warp == 0) {
    add_rows(params, shared, own_slot, lane);
  }
#endif
}

}  // namespace cake::fc2
