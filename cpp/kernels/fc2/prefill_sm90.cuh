// FC2 for many pairs per expert, sm_90a, on common/grouped_mma_sm90.cuh. One BF16 row per pair.
//
// Item = (tile, 128 output columns); CTA c takes items c, c + grid, ... One CTA per SM. Weights and
// tile list do not depend on FC1 (which released this grid only after routing had finished), so the
// weights start before the wait.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/grouped_mma_sm90.cuh"
#include "fc2/params.h"
#include "ptx/pdl.cuh"
#include "ptx/setmaxnreg.cuh"

namespace cake::fc2 {

struct Prefill {
  static constexpr int kHidden = 3584;
  static constexpr int kIntermediate = 384;
  static constexpr int kRowBlocks = kHidden / grouped_mma::kRows;
};

// Stores 128 output columns of the tile's pairs: each lane two consecutive ones, outputs
// 16 warp + 2g and + 1.
__device__ __forceinline__ void store_outputs(const Params& params, const int32_t* pair_ids,
                                              int32_t count, float alpha, int32_t block,
                                              int32_t warp, int32_t lane,
                                              const float (&sums)[grouped_mma::kTilePairs / 2]) {
  const int32_t first_column = block * grouped_mma::kRows + warp * 16 + lane / 4 * 2;
  const int64_t row_columns = int64_t{params.num_blocks} * grouped_mma::kRows;
#pragma unroll
  for (int j = 0; j < grouped_mma::kTilePairs / 8; ++j) {
    if (8 * j < count) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int32_t n = 8 * j + 2 * (lane % 4) + c;
        if (n < count) {
          const int64_t pair = pair_ids[n];
          *reinterpret_cast<__nv_bfloat162*>(params.rows + pair * row_columns + first_column) =
              __floats2bfloat162_rn(sums[4 * j + c] * alpha, sums[4 * j + 2 + c] * alpha);
        }
      }
    }
  }
}

__global__ void __launch_bounds__(grouped_mma::kThreads, 1)
    cake_fc2_prefill_sm90(const __grid_constant__ Params params) {
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
  ptx::griddepcontrol_launch_dependents();
  const int32_t num_items = *params.num_tiles * params.num_blocks;
  const auto item_of = [&](int32_t i) {
    return static_cast<int32_t>(blockIdx.x) + i * static_cast<int32_t>(gridDim.x);
  };
  const auto items = [&](int32_t i) {
    return item_of(i) < num_items ? params.tiles[item_of(i) / params.num_blocks] : Tile{};
  };
  if (warp < kMmaWarps) {
    ptx::setmaxnreg_inc<kMmaRegisters>();
    ptx::griddepcontrol_wait();
    uint32_t weight_uses = 0;
    uint32_t pair_uses = 0;
    for (TileCursor cursor(items); cursor.tile().count > 0; cursor.advance()) {
      const Tile tile = cursor.tile();
      const float alpha = params.fc2_alpha[tile.expert] * kDequantizedSquare;
      float sums[kTilePairs / 2];
      multiply_tile<Prefill::kIntermediate>(shared, tile.count, warp, lane, weight_uses, pair_uses,
                                            sums);
      store_outputs(params, shared.pair_ids[cursor.index() % 2], tile.count, alpha,
                    item_of(cursor.index()) % params.num_blocks, warp, lane, sums);
    }
    return;
  }
  ptx::setmaxnreg_dec<kOtherRegisters>();
  if (warp < kMmaWarps + kUnpackWarps) {
    ptx::griddepcontrol_wait();
    const auto pair_id = [&](const Tile& tile, int32_t n) {
      return params.expert_pairs[tile.first + n];
    };
    const auto row = [&](int32_t pair) -> QuantizedRow {
      return {params.input + int64_t{pair} * (Prefill::kIntermediate / 2),
              params.input_sf + int64_t{pair} * (Prefill::kIntermediate / 16)};
    };
    unpack_items<Prefill::kIntermediate>(shared, items, pair_id, row,
                                         static_cast<int32_t>(threadIdx.x) - kMmaWarps * 32);
  } else {
    uint32_t uses = 0;
    for (TileCursor cursor(items); cursor.tile().count > 0; cursor.advance()) {
      const int64_t index = int64_t{cursor.tile().expert} * Prefill::kRowBlocks +
                            params.first_block + item_of(cursor.index()) % params.num_blocks;
      load_item<Prefill::kIntermediate>(
          shared, params.w2 + index * kRows * (Prefill::kIntermediate / 2),
          params.w2_sf + index * kRows * (Prefill::kIntermediate / 16),
          static_cast<uint32_t>(warp - kMmaWarps - kUnpackWarps), lane, uses);
    }
  }
#endif
}

}  // namespace cake::fc2
