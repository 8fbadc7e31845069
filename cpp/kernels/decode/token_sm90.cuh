// FC2 and finalize of the decode kernel for one token, sm_90a: its rows never go through memory.
//
// A CTA has 32 output columns; 112 CTAs have them all, any others none (the plan sees to it that
// there are 112). Tile i is MMA warp i's: 32 weight rows of the tile's expert (6144 B) and the
// scales of the 128 rows around them (3072 B), by two bulk copies. Three tiles' weights lie in one
// stage of FC2's. The products are left in shared memory, and 16 threads add up two columns each.
// What a warp multiplies, and how rows are added, is as in multiply_fc2 and cake_finalize, bit for
// bit.
//
//   token_full[w]   load thread -> warp w: its weights are there   (1 arrival + bytes)
//   fc1_left, fc1_done   as in fc2_sm90.cuh
//
// Weights, tile list and slots do not depend on FC1, and are fetched before it is done.
#pragma once

#include <cstdint>

#include "common/bf16_pair.cuh"
#include "common/dequantize.cuh"
#include "common/slots.cuh"
#include "common/tile.cuh"
#include "decode/fc2_block_sm90.cuh"
#include "decode/fc2_sm90.cuh"
#include "decode/storage.cuh"
#include "fc2/params.h"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/mbarrier.cuh"

namespace cake::decode {

struct Token : Fc2Block {
  static constexpr int kCtas = kHidden / kRows;
  static constexpr int kWeightBytes = kRows * kRowBytes;
  static constexpr int kTileBytes = kWeightBytes + kScaleBytes;
  static constexpr int kStageTiles = 3;
  static_assert(kMmaWarps >= kTopK, "a warp for each tile that there can be");
  static_assert(kStageTiles * kTileBytes <= Fc1::kStageBytes);
};

// Where a tile's weights lie, its scales behind them.
__device__ __forceinline__ uint8_t* token_weights(Storage& shared, int32_t tile,
                                                  int32_t first_slot) {
  return shared.fc2_stage(tile / Token::kStageTiles, first_slot) +
         tile % Token::kStageTiles * Token::kTileBytes;
}

// The load warp. `fc1_ring`: the next stage of FC1's ring, in the leader.
__device__ __forceinline__ void load_token(const fc2::Params& params, Storage& shared,
                                           RingPosition<Fc1::kStages> fc1_ring, bool is_leader,
                                           int32_t lane) {
  const auto cta = static_cast<int32_t>(blockIdx.x);
  if (cta >= Token::kCtas) {
    return;
  }
  const int32_t first_slot = fc1_ring.stage;
  const uint64_t policy = ptx::createpolicy_evict_first();
  const int32_t num_tiles = load_num_tiles(params.num_tiles);
  const int32_t own_expert = lane < num_tiles ? load_tile(params.tiles + lane).expert : 0;
  for (int32_t i = 0; i < num_tiles; ++i) {
    const int32_t expert = __shfl_sync(0xFFFFFFFFu, own_expert, i);
    if (is_leader) {
      const int64_t rows = int64_t{expert} * Token::kHidden + cta * Token::kRows;
      if (i % Token::kStageTiles == 0) {
        wait_for_stage(shared, i / Token::kStageTiles, fc1_ring);
      }
      const uint32_t weights = ptx::shared_address(token_weights(shared, i, first_slot));
      const uint32_t full = ptx::shared_address(&shared.token_full[i]);
      ptx::mbarrier_arrive_expect_tx(full, Token::kTileBytes);
      ptx::cp_async_bulk(weights, params.w2 + rows * Token::kRowBytes, Token::kWeightBytes, full,
                         policy);
      ptx::cp_async_bulk(weights + Token::kWeightBytes,
                         params.w2_sf + rows / Token::kScaleRows * Token::kScaleBytes,
                         Token::kScaleBytes, full, policy);
    }
  }
}

// Leaves the rows of a tile's pairs, which are slots of the token. `pair`: the lane's, that of
// column `lane / 4`; negative: none. A third of the weights is dequantized while FC1 is not done.
__device__ __forceinline__ void multiply_tile(const fc2::Params& params, Storage& shared,
                                              const uint8_t* weights, float alpha, int32_t pair,
                                              int32_t warp, int32_t lane) {
  const uint8_t* const scales = weights + Token::kWeightBytes;
  const auto quarter = static_cast<int32_t>(blockIdx.x) % 4;
  ptx::mbarrier_wait(ptx::shared_address(&shared.token_full[warp]), 0);
  const Fc2Fragments first(weights, scales, quarter, 0, lane);
  wait_after(shared.fc1_done, 0, first.any());
  const Fc2Pairs pairs(params, pair, lane);
  Fc2Sums sums;
  sums.add(first, pairs, 0);
#pragma unroll
  for (int c = 1; c < 3; ++c) {
    sums.add(Fc2Fragments(weights, scales, quarter, c, lane), pairs, c);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {  // columns 2t + j of the tile
    const int32_t slot = __shfl_sync(0xFFFFFFFFu, pair, lane % 4 * 8 + 4 * j);
    if (slot >= 0) {
      shared.token_rows[slot][lane / 4] = sums.outputs(j, alpha);
    }
  }
}

// One warp: adds up the token's rows, 32 columns.
__device__ __forceinline__ void add_rows(const fc2::Params& params, const Storage& shared,
                                         const RoutedSlot& own_slot, int32_t lane) {
  const TokenSlots slots(own_slot, 0);
  const int32_t word = lane % kTopK;
  float low = 0.0f;
  float high = 0.0f;
#pragma unroll
  for (int slot = 0; slot < kTopK; ++slot) {
    if (slots.is_used(slot)) {
      add_row(slots.weights[slot], reinterpret_cast<const uint32_t*>(shared.token_rows[slot])[word],
              low, high);
    }
  }
  if (lane < kTopK) {
    reinterpret_cast<uint32_t*>(params.output + blockIdx.x * Token::kRows)[word] =
        bf16_pair(low, high);
  }
}

// All MMA warps. `first_slot`: where FC2's first stage lies.
__device__ __forceinline__ void run_token(const fc2::Params& params, Storage& shared,
                                          int32_t first_slot, int32_t warp, int32_t lane) {
  if (static_cast<int32_t>(blockIdx.x) >= Token::kCtas) {
    return;
  }
  const Tile tile =
      warp < load_num_tiles(params.num_tiles) ? load_tile(params.tiles + warp) : Tile{};
  const int32_t pair =
      lane / 4 < tile.count ? __ldcg(params.expert_pairs + tile.first + lane / 4) : -1;
  // Undoes the dequantization factors as well.
  const float alpha = params.fc2_alpha[tile.expert] * kDequantizedSquare;
  const RoutedSlot own_slot =
      warp == 0 && lane < kTopK ? RoutedSlot(params.slots, lane) : RoutedSlot();
  if (tile.count > 0) {
    multiply_tile(params, shared, token_weights(shared, warp, first_slot), alpha, pair, warp, lane);
  }
  ptx::bar_sync(1, kMmaWarps * 32);
  if (warp == 0) {
    add_rows(params, shared, own_slot, lane);
  }
}

}  // namespace cake::decode
