// FC1 + SiTU + requantize for many pairs per expert, sm_90a, on common/grouped_mma_sm90.cuh.
//
// Item = (tile, 256 prepared rows): 128 features of up to 88 pairs; CTA c takes items c, c + grid,
// ... so that the items of a tile run at the same time and read its tokens from L2. One CTA per SM,
// 20 warps:
//
//   16 MMA warps   multiply, then the epilogue: a warp holds up and gate of 8 features of every
//                  pair; two warps exchange the activations of a group of 16 in shared memory
//   4 load warps   take turns at the stages: weights, and the rows of the tile's tokens, which
//                  the quantizer left dequantized as half
//
//   full[s] / empty[s]   a load warp <-> MMA warps   (2 + bytes / 16 arrivals)
//   item_full[i]         load warp 0 -> MMA warps: what item i % 2 is   (1 arrival)
//
// An item's description needs no barrier to be given back: when the next but one is written, every
// MMA warp has released a stage of the next one.
//
// Waits for routing before the first read, then releases the dependents.
#pragma once

#include <cstdint>

#include "common/grouped_mma_sm90.cuh"
#include "common/items.cuh"
#include "common/pipeline.cuh"
#include "common/requantize.cuh"
#include "common/situ.cuh"
#include "common/swizzled_storage.cuh"
#include "fc1/params.h"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tensor_copy.cuh"

namespace cake::fc1 {

struct Prefill {
  static constexpr int kHidden = 3584;
  static constexpr int kIntermediate = 384;
  static constexpr int kRows = grouped_mma::kWarpgroups * grouped_mma::kWarpgroupRows;
  static constexpr int kParts = 2 * kIntermediate / kRows;  // items of a tile
  static constexpr int kUnits = kHidden / grouped_mma::kUnitColumns;
  static constexpr int kStages = 5;
  static constexpr int kUnitBytes = grouped_mma::kUnitColumns / 2;       // of a weight row
  static constexpr int kScaleBytes = 2 * grouped_mma::kScaleBlockBytes;  // 128 rows of a unit
  static constexpr int kChunkPairs = 32;  // pairs whose activations are exchanged at a time
};
// A load warp sees every fourth stage; when it waits for one, the use before the last of that stage
// has been released, so that a parity is never ambiguous.
static_assert(grouped_mma::kOtherWarps < Prefill::kStages, "parity would be ambiguous");

// What the MMA warps need to know of an item.
struct PrefillItem {
  int32_t count;  // pairs; 0 after the last item
  int32_t part;
  float alpha;    // undoes the dequantization factors as well
  float q_scale;  // encoding scale of the intermediate
  float beta, linear_beta;
  alignas(16) int32_t pair_ids[32 * grouped_mma::kPairRegisters];
};

struct PrefillStorage {
  struct Stage {
    grouped_mma::PairUnit pairs;
    uint8_t codes[Prefill::kRows][Prefill::kUnitBytes];
    uint8_t scales[Prefill::kRows / 128][Prefill::kScaleBytes];  // 512 bytes hold 4 columns
  } stages[Prefill::kStages];
  // Of two warps each: 16 features of a pair in a row, 16-byte chunk c at c ^ (pair / 2 % 4).
  float activations[grouped_mma::kMmaWarps / 2][Prefill::kChunkPairs][16];
  PrefillItem items[2];
  uint64_t full[Prefill::kStages];
  uint64_t empty[Prefill::kStages];
  uint64_t item_full[2];
};
static_assert(sizeof(PrefillStorage::Stage) % 1024 == 0,
              "a stage must keep the swizzle's alignment");
static_assert(sizeof(PrefillStorage) <= 232448, "shared memory exceeds 227 KB");

// Describes item `index` to the MMA warps. `pairs`: ids, 32 in a register.
__device__ __forceinline__ void publish_item(const Params& params, PrefillStorage& shared,
                                             int32_t index, const Tile& tile, int32_t part,
                                             const int32_t (&pairs)[grouped_mma::kPairRegisters],
                                             int32_t lane) {
  PrefillItem& item = shared.items[index % 2];
#pragma unroll
  for (int i = 0; i < grouped_mma::kPairRegisters; ++i) {
    item.pair_ids[lane + 32 * i] = pairs[i];
  }
  if (lane == 0) {
    item.count = tile.count;
    item.part = part;
    item.alpha = params.fc1_alpha[tile.expert] * kDequantizedSquare;
    item.q_scale = params.fc2_input_scale[tile.expert];
    item.beta = params.situ_beta[tile.expert];
    item.linear_beta = params.situ_linear_beta[tile.expert];
  }
  release(shared.item_full[index % 2], lane);
}

// Fills every fourth stage: weights by bulk copies, the rows of the pairs' tokens in pieces of 16
// bytes, since their chunks change places.
__device__ __forceinline__ void load_warp(const Params& params, const CUtensorMap& w13_map,
                                          PrefillStorage& shared, const DealtItems& items,
                                          uint32_t turn, int32_t lane) {
  using namespace grouped_mma;
  constexpr int kTokenBytes = Prefill::kHidden * 2;
  constexpr int kScaleRowBlockBytes = 128 * Prefill::kHidden / 16;
  constexpr int kRowBlocks = Prefill::kRows / 128;
  const uint64_t policy = ptx::createpolicy_evict_normal();
  uint32_t uses = 0;
  TileCursor cursor(items);
  for (; cursor.tile().count > 0; cursor.advance()) {
    const int32_t count = cursor.tile().count;
    const int32_t part = cursor.tile().expert * Prefill::kParts + cursor.part();
    const uint8_t* const scales = params.w13_sf + int64_t{part} * kRowBlocks * kScaleRowBlockBytes;
    int32_t pairs[kPairRegisters];
    uint32_t
        token_rows[kPairRegisters];  // byte offsets; rows beyond the last repeat row 0 of `halves`
#pragma unroll
    for (int i = 0; i < kPairRegisters; ++i) {
      const int32_t n = lane + 32 * i;
      pairs[i] = n < count ? params.expert_pairs[cursor.tile().first + n] : -1;
      token_rows[i] = n < count ? static_cast<uint32_t>(pairs[i]) / 16 * kTokenBytes : 0;
    }
    if (turn == 0) {
      publish_item(params, shared, cursor.index(), cursor.tile(), cursor.part(), pairs, lane);
    }
    for (int32_t k = 0; k < Prefill::kUnits; ++k, ++uses) {
      if (uses % kOtherWarps != turn) {
        continue;
      }
      const Slot<Prefill::kStages> slot(uses);
      PrefillStorage::Stage& stage = shared.stages[slot.stage];
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[slot.stage]), slot.parity ^ 1);
      const uint32_t full = ptx::shared_address(&shared.full[slot.stage]);
      if (lane == 0) {
        ptx::mbarrier_arrive_expect_tx(full, sizeof(stage.codes) + sizeof(stage.scales));
        ptx::cp_async_bulk_tensor_2d(ptx::shared_address(stage.codes), w13_map,
                                     k * Prefill::kUnitBytes, part * Prefill::kRows, full);
        for (int i = 0; i < kRowBlocks; ++i) {
          ptx::cp_async_bulk(ptx::shared_address(stage.scales[i]),
                             scales + i * kScaleRowBlockBytes + k * Prefill::kScaleBytes,
                             Prefill::kScaleBytes, full, policy);
        }
      }
      __syncwarp();
      // Eight rows in four steps; lanes 0 .. 15 the even ones.
      const uint32_t pair_rows =
          ptx::shared_address(stage.pairs.blocks[lane / 8 % 2]) + lane / 16 * 128;
      const uint8_t* const halves = params.halves + k * (kUnitColumns * 2) + lane % 16 * 16;
#pragma unroll
      for (int i = 0; i < kTilePairs / 8; ++i) {
        if (8 * i < count) {
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const uint32_t row =
                __shfl_sync(0xFFFFFFFFu, token_rows[i / 4], i % 4 * 8 + 2 * m + lane / 16);
            ptx::cp_async_16(pair_rows + i * 1024 + m * 256 + (lane % 8 ^ (2 * m + lane / 16)) * 16,
                             halves + row);
          }
        }
      }
      ptx::cp_async_wait_all();
      ptx::fence_proxy_async();  // wgmma reads by the asynchronous proxy
      release(shared.full[slot.stage], lane);
    }
  }
  if (turn == 0) {  // count 0: the end
    const int32_t index = cursor.index();
    if (lane == 0) {
      shared.items[index % 2].count = 0;
    }
    release(shared.item_full[index % 2], lane);
  }
}

// Sums of the item's rows over all columns.
template <int N>
__device__ __forceinline__ void multiply_item(PrefillStorage& shared,
                                              RingPosition<Prefill::kStages>& ring, int32_t warp,
                                              int32_t lane,
                                              float (&sums)[grouped_mma::kTilePairs / 2]) {
  using namespace grouped_mma;
  const int32_t row = LaneRow(warp, lane).row();
  const int32_t t = lane % 4;
  const int32_t codes_offset = (warp / 2 * 32 + row) * Prefill::kUnitBytes + t * 16;
  const int32_t scales_offset = warp / 8 * Prefill::kScaleBytes + t / 2 * kScaleBlockBytes +
                                row * 16 + warp / 2 % 4 * 4 + t % 2 * 2;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    sums[i] = 0.0f;
  }
  RawUnit raw;
  const auto load = [&](const RingPosition<Prefill::kStages>& position) {
    const PrefillStorage::Stage& stage = shared.stages[position.stage];
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[position.stage]), position.parity);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      raw.codes[r] = *reinterpret_cast<const uint4*>(stage.codes[0] + codes_offset +
                                                     r * 8 * Prefill::kUnitBytes);
      raw.scales[r] = *reinterpret_cast<const uint16_t*>(stage.scales[0] + scales_offset + r * 128);
    }
  };
  load(ring);
#pragma unroll 4  // 2 % at 73 pairs per expert: fewer ring addresses to compute
  for (int32_t k = 0; k < Prefill::kUnits; ++k) {
    const int32_t stage = ring.stage;
    Fragments fragments;
    multiply_unit<N>(raw, ptx::shared_address(&shared.stages[stage].pairs), fragments, sums);
    ring.advance();
    if (k + 1 < Prefill::kUnits) {
      load(ring);
    }
    ptx::wgmma_wait_all<N>(sums);
    release(shared.empty[stage], lane);
  }
}

// Requantizes (recipe Q') and stores the item's 128 features of the tile's pairs. After the
// exchange, lane l of a warp has half a group (8 features) of pair 16 (warp % 2) + l % 16 of the
// chunk, lane l ^ 16 the other half.
__device__ __forceinline__ void store_features(const Params& params, PrefillStorage& shared,
                                               const PrefillItem& item, int32_t warp, int32_t lane,
                                               const float (&sums)[grouped_mma::kTilePairs / 2]) {
  using namespace grouped_mma;
  const int32_t t = lane % 4;
  const int32_t feature = LaneRow(warp, lane).feature();
  const int32_t group = item.part * (Prefill::kRows / 32) + warp / 2;
  const int32_t count = item.count;
  const float alpha = item.alpha;
  const float q_scale = item.q_scale;
  const SituConstants constants(item.beta, item.linear_beta);
  const int32_t half = lane / 16;
  const int32_t partners = 1 + warp / 2;
  float (&activations)[Prefill::kChunkPairs][16] = shared.activations[warp / 2];
#pragma unroll
  for (int chunk = 0; chunk < kPairRegisters; ++chunk) {
    const int first = chunk * Prefill::kChunkPairs;
    if (first < count) {
      const int32_t n = warp % 2 * 16 + lane % 16;
#pragma unroll
      for (int i = 0; i < Prefill::kChunkPairs / 8; ++i) {
        const int j = first / 8 + i;
        if (j < kTilePairs / 8 && 8 * j < count) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            activations[8 * i + 2 * t + c][(feature / 4 ^ t) * 4 + feature % 4] =
                situ(alpha * sums[4 * j + 2 + c], alpha * sums[4 * j + c], constants);
          }
        }
      }
      ptx::bar_sync(partners, 64);
      float values[8];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 four =
            *reinterpret_cast<const float4*>(&activations[n][((2 * half + i) ^ (n / 2 % 4)) * 4]);
        values[4 * i] = four.x, values[4 * i + 1] = four.y;
        values[4 * i + 2] = four.z, values[4 * i + 3] = four.w;
      }
      ptx::bar_sync(partners, 64);  // they may be overwritten
      float amax = fabsf(values[0]);
#pragma unroll
      for (int i = 1; i < 8; ++i) {
        amax = fmaxf(amax, fabsf(values[i]));
      }
      amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 16));
      const GroupScale scale = group_scale(amax, q_scale);
      uint32_t codes = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        codes |= requantize(values[i], scale, q_scale) << (4 * i);
      }
      const int64_t pair = item.pair_ids[first + n];
      if (pair >= 0) {
        *reinterpret_cast<uint32_t*>(params.packed + pair * (Prefill::kIntermediate / 2) +
                                     group * 8 + half * 4) = codes;
        if (half == 0) {
          params.sf[pair * (Prefill::kIntermediate / 16) + group] = static_cast<uint8_t>(scale.sf);
        }
      }
    }
  }
}

__global__ void __launch_bounds__(grouped_mma::kThreads, 1)
    cake_fc1_prefill_sm90(const __grid_constant__ Params params,
                          const __grid_constant__ CUtensorMap w13_map) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  __trap();  // the plan never picks this kernel elsewhere
#else
  using namespace grouped_mma;
  extern __shared__ __align__(1024) uint8_t fc1_prefill_storage[];
  PrefillStorage& shared = swizzled_storage<PrefillStorage>(fc1_prefill_storage);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Prefill::kStages; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[s]), 2);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[s]), kMmaWarps);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&shared.item_full[i]), 1);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (warp >= kMmaWarps) {
    ptx::setmaxnreg_dec<kOtherRegisters>();
    const DealtItems items{params.tiles, *params.num_tiles, Prefill::kParts};
    load_warp(params, w13_map, shared, items, static_cast<uint32_t>(warp - kMmaWarps), lane);
    return;
  }
  ptx::setmaxnreg_inc<kMmaRegisters>();
  RingPosition<Prefill::kStages> ring;
  for (RingPosition<2> i;; i.advance()) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.item_full[i.stage]), i.parity);
    const PrefillItem& item = shared.items[i.stage];
    if (item.count == 0) {
      break;
    }
    float sums[kTilePairs / 2];
    with_columns(item.count, [&]<int N>() { multiply_item<N>(shared, ring, warp, lane, sums); });
    store_features(params, shared, item, warp, lane, sums);
  }
#endif
}

}  // namespace cake::fc1
