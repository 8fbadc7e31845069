// FC2 for many pairs per expert, sm_90a, on common/grouped_mma_sm90.cuh. One BF16 row per pair.
//
// Item = (tile, a few blocks of 128 output columns); CTA c takes items c, c + grid, ... One CTA per
// SM, 16 warps:
//
//   5 unpack warps   once per item: the pairs' intermediate, all 384 columns in three stages,
//                    stored as half; it stays while the item's row blocks pass
//   3 load warps     codes and scales of 128 rows x 128 columns per stage; they take turns
//   8 MMA warps      multiply a row block, store its outputs, next row block
//
//   weights_full / weights_empty[s]   a load warp <-> MMA warps      (32 / 8 arrivals)
//   pairs_full / pairs_empty[k]       unpack warps <-> MMA warps     (5 / 8 arrivals)
//
// Weights and tile list do not depend on FC1 (which released this grid only after routing had
// finished), so the weights start before the wait.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/grouped_mma_sm90.cuh"
#include "fc2/params.h"
#include "ptx/barrier.cuh"
#include "ptx/pdl.cuh"
#include "ptx/setmaxnreg.cuh"

namespace cake::fc2 {

struct Prefill {
  static constexpr int kHidden = 3584;
  static constexpr int kIntermediate = 384;
  static constexpr int kRowBlocks = kHidden / grouped_mma::kRows;
  static constexpr int kPairStages = kIntermediate / grouped_mma::kStageColumns;
  static constexpr int kWeightStages = 8;
  static constexpr int kItemBlocks = 7;  // at most so many row blocks of an item
  static constexpr int kUnpackWarps = 5;
  static constexpr int kLoadWarps = 3;
  static constexpr int kUnpackThreads = kUnpackWarps * 32;
  static constexpr int kThreads = (grouped_mma::kMmaWarps + kUnpackWarps + kLoadWarps) * 32;
  // Registers of a thread: 128 at launch (512 threads), then moved to the MMA warpgroups. Together
  // they must not exceed the launch's: the CTA would wait for ever.
  static constexpr int kMmaRegisters = 160;
  static constexpr int kOtherRegisters = 96;
};
static_assert(Prefill::kUnpackThreads == grouped_mma::kTilePairs, "an unpack thread has one pair");
// A load warp sees every kLoadWarps-th stage; when it waits for one, the use before the last of
// that stage has been released, so that a parity is never ambiguous.
static_assert(Prefill::kLoadWarps < Prefill::kWeightStages, "parity would be ambiguous");
static_assert(Prefill::kMmaRegisters + Prefill::kOtherRegisters <= 2 * 128, "too many registers");

struct PrefillStorage {
  grouped_mma::PairStage pairs[Prefill::kPairStages];
  grouped_mma::WeightStage weights[Prefill::kWeightStages];
  alignas(16) int32_t pair_ids[2][grouped_mma::kTilePairs];  // of an item and the one after it
  uint64_t weights_full[Prefill::kWeightStages];
  uint64_t weights_empty[Prefill::kWeightStages];
  uint64_t pairs_full[Prefill::kPairStages];
  uint64_t pairs_empty[Prefill::kPairStages];
};
static_assert(sizeof(PrefillStorage) <= 232448, "shared memory exceeds 227 KB");

// The stages of one row block as the MMA warps see them. The pairs are waited for at an item's
// first row block and released at its last one.
struct PrefillPipeline {
  PrefillStorage& shared;
  uint32_t weight_uses;  // stages since the kernel began
  uint32_t item_parity;
  bool first, last;
  int32_t lane;

  using Slot = grouped_mma::Slot<Prefill::kWeightStages>;

  __device__ __forceinline__ const grouped_mma::WeightStage& weights(int32_t k) const {
    return shared.weights[Slot(weight_uses + k).stage];
  }
  __device__ __forceinline__ const grouped_mma::PairStage& pairs(int32_t k) const {
    return shared.pairs[k];
  }
  __device__ __forceinline__ void wait_weights(int32_t k) const {
    const Slot slot(weight_uses + k);
    ptx::mbarrier_wait(ptx::shared_address(&shared.weights_full[slot.stage]), slot.parity);
  }
  __device__ __forceinline__ void wait_pairs(int32_t k) const {
    if (first) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.pairs_full[k]), item_parity);
    }
  }
  __device__ __forceinline__ void release_weights(int32_t k) const {
    release(shared.weights_empty[Slot(weight_uses + k).stage], lane);
  }
  __device__ __forceinline__ void release_pairs(int32_t k) const {
    if (last) {
      release(shared.pairs_empty[k], lane);
    }
  }
};

// Dequantizes 64 columns of a pair, 32 bytes of codes and four scales, into row n of a block.
__device__ __forceinline__ void unpack_block(const uint4 (&codes)[2], uint32_t scales,
                                             uint8_t* rows, int32_t n) {
  const uint32_t words[8] = {codes[0].x, codes[0].y, codes[0].z, codes[0].w,
                             codes[1].x, codes[1].y, codes[1].z, codes[1].w};
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    uint32_t halves[4][4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      dequantize8(words[2 * t + v], grouped_mma::broadcast_scale(scales, t), halves[t]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t chunk = (4 * v + i) ^ (n % 8);
      *reinterpret_cast<uint4*>(rows + n * 128 + chunk * 16) =
          make_uint4(halves[0][i], halves[1][i], halves[2][i], halves[3][i]);
    }
  }
}

// Thread n has pair n of every item's tile.
__device__ __forceinline__ void unpack_warps(const Params& params, PrefillStorage& shared,
                                             const grouped_mma::DealtItems& items, int32_t n) {
  using namespace grouped_mma;
  TileCursor cursor(items);
  const auto lookup = [&](const Tile& tile) {
    return n < tile.count ? params.expert_pairs[tile.first + n] : -1;
  };
  int32_t pair = lookup(cursor.tile());
  uint32_t parity = 0;
  for (; cursor.tile().count > 0; cursor.advance(), parity ^= 1) {
    const int32_t next_pair = lookup(cursor.next());
    for (int32_t k = 0; k < Prefill::kPairStages; ++k) {
      uint4 codes[2][2]{};
      uint32_t scales[2]{};
      if (pair >= 0) {
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          const auto* source = reinterpret_cast<const uint4*>(
              params.input + int64_t{pair} * (Prefill::kIntermediate / 2) + (2 * k + block) * 32);
          codes[block][0] = source[0];
          codes[block][1] = source[1];
          scales[block] = reinterpret_cast<const uint32_t*>(
              params.input_sf + int64_t{pair} * (Prefill::kIntermediate / 16))[2 * k + block];
        }
      }
      ptx::mbarrier_wait(ptx::shared_address(&shared.pairs_empty[k]), parity ^ 1);
      if (k == 0) {  // the MMA warps are past the item before the last
        shared.pair_ids[parity][n] = pair;
      }
      if (pair >= 0) {
        unpack_block(codes[0], scales[0], shared.pairs[k].blocks[0], n);
        unpack_block(codes[1], scales[1], shared.pairs[k].blocks[1], n);
      }
      ptx::fence_proxy_async();
      release(shared.pairs_full[k], n % 32);
    }
    pair = next_pair;
  }
}

// Stores 128 output columns of the tile's pairs: each lane two consecutive ones, outputs
// 16 warp + 2g and + 1.
__device__ __forceinline__ void store_outputs(const Params& params, const int32_t* pair_ids,
                                              int32_t count, float alpha, int32_t block,
                                              int32_t warp, int32_t lane,
                                              const float (&sums)[grouped_mma::kTilePairs / 2]) {
  const int32_t first_column = block * grouped_mma::kRows + warp * 16 + lane / 4 * 2;
  const int32_t row_columns = params.num_blocks * grouped_mma::kRows;
  constexpr int kBatch = 4;  // 8-pair columns whose ids are read together
#pragma unroll
  for (int first = 0; first < grouped_mma::kTilePairs / 8; first += kBatch) {
    if (8 * first < count) {
      int2 ids[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        ids[i] = *reinterpret_cast<const int2*>(pair_ids + 8 * (first + i) + 2 * (lane % 4));
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int j = first + i;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (8 * j + 2 * (lane % 4) + c < count) {
            const int64_t pair = c == 0 ? ids[i].x : ids[i].y;
            *reinterpret_cast<__nv_bfloat162*>(params.rows + pair * row_columns + first_column) =
                __floats2bfloat162_rn(sums[4 * j + c] * alpha, sums[4 * j + 2 + c] * alpha);
          }
        }
      }
    }
  }
}

__global__ void __launch_bounds__(Prefill::kThreads, 1)
    cake_fc2_prefill_sm90(const __grid_constant__ Params params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  __trap();  // the plan never picks this kernel elsewhere
#else
  using namespace grouped_mma;
  extern __shared__ __align__(1024) uint8_t fc2_prefill_storage[];
  PrefillStorage& shared = *reinterpret_cast<PrefillStorage*>(fc2_prefill_storage);
  if (ptx::shared_address(&shared) % 1024 != 0) {
    __trap();  // the swizzle counts on it
  }
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Prefill::kWeightStages; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&shared.weights_full[s]), 32);
      ptx::mbarrier_init(ptx::shared_address(&shared.weights_empty[s]), kMmaWarps);
    }
    for (int k = 0; k < Prefill::kPairStages; ++k) {
      ptx::mbarrier_init(ptx::shared_address(&shared.pairs_full[k]), Prefill::kUnpackWarps);
      ptx::mbarrier_init(ptx::shared_address(&shared.pairs_empty[k]), kMmaWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  // An item is a group of row blocks of a tile.
  const int32_t groups = (params.num_blocks + Prefill::kItemBlocks - 1) / Prefill::kItemBlocks;
  const DealtItems items{params.tiles, *params.num_tiles, groups};
  const auto for_each_block = [&](int32_t group, const auto& body) {
    const int32_t end = (group + 1) * params.num_blocks / groups;
    const int32_t begin = group * params.num_blocks / groups;
    for (int32_t block = begin; block < end; ++block) {
      body(block, block == begin, block + 1 == end);
    }
  };
  if (warp < kMmaWarps) {
    ptx::setmaxnreg_inc<Prefill::kMmaRegisters>();
    ptx::griddepcontrol_wait();
    uint32_t weight_uses = 0;
    for (TileCursor cursor(items); cursor.tile().count > 0; cursor.advance()) {
      const Tile tile = cursor.tile();
      const uint32_t parity = cursor.index() % 2;
      const float alpha = params.fc2_alpha[tile.expert] * kDequantizedSquare;
      for_each_block(cursor.part(), [&](int32_t block, bool first, bool last) {
        const PrefillPipeline pipeline{shared, weight_uses, parity, first, last, lane};
        float sums[kTilePairs / 2];
        multiply_tile<Prefill::kPairStages>(pipeline, tile.count, warp, lane, sums);
        weight_uses += Prefill::kPairStages;
        store_outputs(params, shared.pair_ids[parity], tile.count, alpha, block, warp, lane, sums);
      });
    }
    return;
  }
  ptx::setmaxnreg_dec<Prefill::kOtherRegisters>();
  if (warp < kMmaWarps + Prefill::kUnpackWarps) {
    ptx::griddepcontrol_wait();
    unpack_warps(params, shared, items, static_cast<int32_t>(threadIdx.x) - kMmaWarps * 32);
    return;
  }
  const auto turn = static_cast<uint32_t>(warp - kMmaWarps - Prefill::kUnpackWarps);
  uint32_t uses = 0;
  for (TileCursor cursor(items); cursor.tile().count > 0; cursor.advance()) {
    const int32_t expert = cursor.tile().expert;
    for_each_block(cursor.part(), [&](int32_t block, bool, bool) {
      const int64_t index = int64_t{expert} * Prefill::kRowBlocks + params.first_block + block;
      const uint8_t* const codes = params.w2 + index * kRows * (Prefill::kIntermediate / 2);
      const uint8_t* const scales = params.w2_sf + index * kRows * (Prefill::kIntermediate / 16);
      for (int32_t k = 0; k < Prefill::kPairStages; ++k, ++uses) {
        if (uses % Prefill::kLoadWarps == turn) {
          const Slot<Prefill::kWeightStages> slot(uses);
          ptx::mbarrier_wait(ptx::shared_address(&shared.weights_empty[slot.stage]),
                             slot.parity ^ 1);
          load_weights<Prefill::kIntermediate>(shared.weights[slot.stage],
                                               codes + k * kStageColumns / 2,
                                               scales + k * 2 * kScaleBlockBytes, lane);
          ptx::cp_async_mbarrier_arrive_noinc(
              ptx::shared_address(&shared.weights_full[slot.stage]));
        }
      }
    });
  }
#endif
}

}  // namespace cake::fc2
