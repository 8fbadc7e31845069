// FC1 + SiTU + requantize for many pairs per expert, sm_90a, on common/grouped_mma_sm90.cuh.
//
// Item = (tile, 128 prepared rows): 64 features of up to 160 pairs; CTA c takes items c, c + grid,
// ... so that the items of a tile run at the same time and read its tokens from L2. One CTA per SM,
// 12 warps:
//
//   4 load warps   warp w fills stage w: weights, and the rows of the tile's tokens, which
//                  the quantizer left dequantized as half
//   8 MMA warps    multiply, then the epilogue: a warp holds up and gate of 8 features of
//                  every pair; the two warps of a group of 16 exchange their maxima
//
//   full[s] / empty[s]   load warp s <-> MMA warps   (32 / 8 arrivals)
//
// Waits for routing before the first read, then releases the dependents.
#pragma once

#include <cstdint>

#include "common/grouped_mma_sm90.cuh"
#include "common/requantize.cuh"
#include "common/situ.cuh"
#include "fc1/params.h"
#include "ptx/barrier.cuh"
#include "ptx/pdl.cuh"

namespace cake::fc1 {

struct Prefill {
  static constexpr int kHidden = 3584;
  static constexpr int kIntermediate = 384;
  static constexpr int kExpertRows = 2 * kIntermediate;
  static constexpr int kRowBlocks = kExpertRows / grouped_mma::kRows;
  static constexpr int kItemStages = kHidden / grouped_mma::kStageColumns;
  static constexpr int kStages = 4;
  static constexpr int kLoadWarps = kStages;
  static constexpr int kThreads = (grouped_mma::kMmaWarps + kLoadWarps) * 32;
};

struct PrefillStorage {
  struct Stage {
    grouped_mma::PairStage pairs;
    grouped_mma::WeightStage weights;
  } stages[Prefill::kStages];
  float amax[grouped_mma::kMmaWarps][grouped_mma::kTilePairs];
  uint64_t full[Prefill::kStages];
  uint64_t empty[Prefill::kStages];
};
static_assert(sizeof(PrefillStorage::Stage) % 1024 == 0,
              "a stage must keep the swizzle's alignment");
static_assert(sizeof(PrefillStorage) <= 232448, "shared memory exceeds 227 KB");

// The stages of one item as the MMA warps see them; `uses` counts stages since the kernel began.
struct PrefillPipeline {
  PrefillStorage& shared;
  uint32_t uses;
  int32_t lane;

  using Slot = grouped_mma::Slot<Prefill::kStages>;

  __device__ __forceinline__ PrefillStorage::Stage& stage(int32_t k) const {
    return shared.stages[Slot(uses + k).stage];
  }
  __device__ __forceinline__ const grouped_mma::WeightStage& weights(int32_t k) const {
    return stage(k).weights;
  }
  __device__ __forceinline__ const grouped_mma::PairStage& pairs(int32_t k) const {
    return stage(k).pairs;
  }
  __device__ __forceinline__ void wait_weights(int32_t k) const {
    const Slot slot(uses + k);
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[slot.stage]), slot.parity);
  }
  // The pairs came with the weights, by the generic proxy; wgmma reads by the asynchronous one.
  __device__ __forceinline__ void wait_pairs(int32_t) const { ptx::fence_proxy_async(); }
  __device__ __forceinline__ void release_weights(int32_t) const {}
  __device__ __forceinline__ void release_pairs(int32_t k) const {
    release(shared.empty[Slot(uses + k).stage], lane);
  }
};

// Fills stage `warp` whenever it is its turn.
__device__ __forceinline__ void load_warp(const Params& params, PrefillStorage& shared,
                                          const grouped_mma::DealtItems& items,
                                          uint32_t load_warp_index, int32_t lane) {
  using namespace grouped_mma;
  constexpr int kRowBytes = Prefill::kHidden * 2;
  PrefillStorage::Stage& stage = shared.stages[load_warp_index];
  const uint32_t full = ptx::shared_address(&shared.full[load_warp_index]);
  const uint32_t empty = ptx::shared_address(&shared.empty[load_warp_index]);
  const int32_t chunk = lane % 8;
  uint32_t uses = 0;
  uint32_t parity = 0;
  for (TileCursor cursor(items); cursor.tile().count > 0; cursor.advance()) {
    const Tile& tile = cursor.tile();
    const int64_t row_block = int64_t{tile.expert} * Prefill::kRowBlocks + cursor.part();
    const uint8_t* const codes = params.w13 + row_block * kRows * (Prefill::kHidden / 2);
    const uint8_t* const scales = params.w13_sf + row_block * kRows * (Prefill::kHidden / 16);
    int32_t tokens[kTilePairs / 32];
#pragma unroll
    for (int i = 0; i < kTilePairs / 32; ++i) {
      const int32_t n = lane + 32 * i;
      tokens[i] = n < tile.count ? params.expert_pairs[tile.first + n] / 16 : 0;
    }
    for (int32_t k = 0; k < Prefill::kItemStages; ++k, ++uses) {
      if (uses % Prefill::kStages != load_warp_index) {
        continue;
      }
      ptx::mbarrier_wait(empty, parity ^ 1);
      parity ^= 1;
      load_weights<Prefill::kHidden>(stage.weights, codes + k * kStageColumns / 2,
                                     scales + k * 2 * kScaleBlockBytes, lane);
#pragma unroll
      for (int i = 0; i < kTilePairs / 4; ++i) {  // 4 rows of two blocks
        if (4 * i < tile.count) {
          const int32_t n = 4 * i + lane / 8;
          const int64_t token = __shfl_sync(0xFFFFFFFFu, tokens[i / 8], n % 32);
          const uint8_t* source =
              params.halves + token * kRowBytes + k * kStageColumns * 2 + chunk * 16;
          const int32_t offset = n * 128 + (chunk ^ (n % 8)) * 16;
          if (n < tile.count) {
            ptx::cp_async_16(ptx::shared_address(stage.pairs.blocks[0]) + offset, source);
            ptx::cp_async_16(ptx::shared_address(stage.pairs.blocks[1]) + offset, source + 128);
          }
        }
      }
      ptx::cp_async_mbarrier_arrive_noinc(full);
    }
  }
}

// What the epilogue needs of an expert; looked up before the multiplication.
struct EpilogueScales {
  float alpha;    // undoes the dequantization factors as well
  float q_scale;  // encoding scale of the intermediate
  SituConstants situ_constants;

  __device__ __forceinline__ EpilogueScales(const Params& params, int32_t expert)
      : alpha(params.fc1_alpha[expert] * kDequantizedSquare),
        q_scale(params.fc2_input_scale[expert]),
        situ_constants(params.situ_beta[expert], params.situ_linear_beta[expert]) {}
};

// Requantizes and stores the item's 64 features of the tile's pairs from the MMA sums.
__device__ __forceinline__ void store_features(const Params& params, PrefillStorage& shared,
                                               const Tile& tile, const EpilogueScales& scales,
                                               int32_t row_block, int32_t warp, int32_t lane,
                                               float (&sums)[grouped_mma::kTilePairs / 2]) {
  const int32_t t = lane % 4;
  const int32_t g = lane / 4;
#pragma unroll
  for (int j = 0; j < grouped_mma::kTilePairs / 8; ++j) {
    if (8 * j < tile.count) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float value = situ(scales.alpha * sums[4 * j + 2 + c], scales.alpha * sums[4 * j + c],
                                 scales.situ_constants);
        sums[4 * j + c] = value;  // the activation takes the place of its up sum
        float amax = fabsf(value);
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, distance));
        }
        if (g == 0) {
          shared.amax[warp][8 * j + 2 * t + c] = amax;
        }
      }
    }
  }
  const int32_t partners = 1 + warp / 2;
  ptx::bar_sync(partners, 64);
#pragma unroll
  for (int j = 0; j < grouped_mma::kTilePairs / 8; ++j) {
    if (8 * j < tile.count) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int32_t column = 8 * j + 2 * t + c;
        const float amax = fmaxf(shared.amax[warp][column], shared.amax[warp ^ 1][column]);
        const GroupScale scale = group_scale(amax, scales.q_scale);
        // Features 8 (warp % 2) + g: four bytes of the group's eight.
        uint32_t codes = requantize(sums[4 * j + c], scale, scales.q_scale) << (4 * g);
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          codes |= __shfl_xor_sync(0xFFFFFFFFu, codes, distance);
        }
        if (g == 0 && column < tile.count) {
          const int64_t pair = params.expert_pairs[tile.first + column];
          const int32_t group = row_block * 4 + warp / 2;
          *reinterpret_cast<uint32_t*>(params.packed + pair * (Prefill::kIntermediate / 2) +
                                       group * 8 + warp % 2 * 4) = codes;
          if (warp % 2 == 0) {
            params.sf[pair * (Prefill::kIntermediate / 16) + group] =
                static_cast<uint8_t>(scale.sf);
          }
        }
      }
    }
  }
  ptx::bar_sync(partners, 64);  // the maxima may be overwritten
}

__global__ void __launch_bounds__(Prefill::kThreads, 1)
    cake_fc1_prefill_sm90(const __grid_constant__ Params params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  __trap();  // the plan never picks this kernel elsewhere
#else
  using namespace grouped_mma;
  extern __shared__ __align__(1024) uint8_t fc1_prefill_storage[];
  PrefillStorage& shared = *reinterpret_cast<PrefillStorage*>(fc1_prefill_storage);
  if (ptx::shared_address(&shared) % 1024 != 0) {
    __trap();  // the swizzle counts on it
  }
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Prefill::kStages; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[s]), 32);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[s]), kMmaWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const DealtItems items{params.tiles, *params.num_tiles, Prefill::kRowBlocks};
  if (warp >= kMmaWarps) {
    load_warp(params, shared, items, static_cast<uint32_t>(warp - kMmaWarps), lane);
    return;
  }
  uint32_t uses = 0;
  for (TileCursor cursor(items); cursor.tile().count > 0; cursor.advance()) {
    const Tile tile = cursor.tile();
    const EpilogueScales scales(params, tile.expert);
    const PrefillPipeline pipeline{shared, uses, lane};
    float sums[kTilePairs / 2];
    multiply_tile<Prefill::kItemStages>(pipeline, tile.count, warp, lane, sums);
    uses += Prefill::kItemStages;
    store_features(params, shared, tile, scales, cursor.part(), warp, lane, sums);
  }
#endif
}

}  // namespace cake::fc1
