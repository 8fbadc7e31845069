// FC1 + SiTU + requantize for many pairs per expert, sm_90a, on common/grouped_mma_sm90.cuh.
//
// Item = (tile, 128 prepared rows): 64 features of up to 160 pairs; CTA c takes items c, c + grid,
// ... so that the items of a tile run at the same time and read its tokens from L2. One CTA per SM.
// Epilogue: a warp holds up and gate of 8 features of every pair; the two warps of a requantization
// group exchange their maxima through shared memory.
// Waits for routing before the first read, then releases the dependents.
#pragma once

#include <cstdint>

#include "common/grouped_mma_sm90.cuh"
#include "common/requantize.cuh"
#include "common/situ.cuh"
#include "fc1/params.h"
#include "ptx/pdl.cuh"
#include "ptx/setmaxnreg.cuh"

namespace cake::fc1 {

struct Prefill {
  static constexpr int kHidden = 3584;
  static constexpr int kIntermediate = 384;
  static constexpr int kExpertRows = 2 * kIntermediate;
  static constexpr int kRowBlocks = kExpertRows / grouped_mma::kRows;
};

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

// Requantizes and stores the item's 64 features of `count` pairs from the MMA sums.
__device__ __forceinline__ void store_features(const Params& params, grouped_mma::Storage& shared,
                                               const int32_t* pair_ids, int32_t count,
                                               const EpilogueScales& scales, int32_t row_block,
                                               int32_t warp, int32_t lane,
                                               float (&sums)[grouped_mma::kTilePairs / 2]) {
  const int32_t t = lane % 4;
  const int32_t g = lane / 4;
#pragma unroll
  for (int j = 0; j < grouped_mma::kTilePairs / 8; ++j) {
    if (8 * j < count) {
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
    if (8 * j < count) {
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
        if (g == 0 && column < count) {
          const int64_t pair = pair_ids[column];
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

__global__ void __launch_bounds__(grouped_mma::kThreads, 1)
    cake_fc1_prefill_sm90(const __grid_constant__ Params params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  __trap();  // the plan never picks this kernel elsewhere
#else
  using namespace grouped_mma;
  extern __shared__ __align__(1024) uint8_t storage[];
  Storage& shared = *reinterpret_cast<Storage*>(storage);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  if (threadIdx.x == 0) {
    init_barriers(shared);
  }
  __syncthreads();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int32_t num_items = *params.num_tiles * Prefill::kRowBlocks;
  const auto item_of = [&](int32_t i) {
    return static_cast<int32_t>(blockIdx.x) + i * static_cast<int32_t>(gridDim.x);
  };
  const auto items = [&](int32_t i) {
    return item_of(i) < num_items ? params.tiles[item_of(i) / Prefill::kRowBlocks] : Tile{};
  };
  if (warp < kMmaWarps) {
    ptx::setmaxnreg_inc<kMmaRegisters>();
    uint32_t weight_uses = 0;
    uint32_t pair_uses = 0;
    for (TileCursor cursor(items); cursor.tile().count > 0; cursor.advance()) {
      const Tile tile = cursor.tile();
      const EpilogueScales scales(params, tile.expert);
      float sums[kTilePairs / 2];
      multiply_tile<Prefill::kHidden>(shared, tile.count, warp, lane, weight_uses, pair_uses, sums);
      store_features(params, shared, shared.pair_ids[cursor.index() % 2], tile.count, scales,
                     item_of(cursor.index()) % Prefill::kRowBlocks, warp, lane, sums);
    }
    return;
  }
  ptx::setmaxnreg_dec<kOtherRegisters>();
  if (warp < kMmaWarps + kUnpackWarps) {
    const auto pair_id = [&](const Tile& tile, int32_t n) {
      return params.expert_pairs[tile.first + n];
    };
    const auto row = [&](int32_t pair) -> QuantizedRow {
      const int64_t token = pair / 16;
      return {params.input + token * (Prefill::kHidden / 2),
              params.input_sf + token * (Prefill::kHidden / 16)};
    };
    unpack_items<Prefill::kHidden>(shared, items, pair_id, row,
                                   static_cast<int32_t>(threadIdx.x) - kMmaWarps * 32);
  } else {
    uint32_t uses = 0;
    for (TileCursor cursor(items); cursor.tile().count > 0; cursor.advance()) {
      const int64_t block = int64_t{cursor.tile().expert} * Prefill::kRowBlocks +
                            item_of(cursor.index()) % Prefill::kRowBlocks;
      load_item<Prefill::kHidden>(shared, params.w13 + block * kRows * (Prefill::kHidden / 2),
                                  params.w13_sf + block * kRows * (Prefill::kHidden / 16),
                                  static_cast<uint32_t>(warp - kMmaWarps - kUnpackWarps), lane,
                                  uses);
    }
  }
#endif
}

}  // namespace cake::fc1
