// FC1 + SiTU + requantize for many pairs per expert, sm_90a, on common/grouped_mma_sm90.cuh.
//
// Item = (tile, kRows prepared rows): half as many features of the tile's pairs, 128 of up to 88
// (Narrow) or 96 of up to 176 (Wide). CTA c takes items c, c + grid, ... so that the items of a
// tile run at the same time and read its tokens from L2. One CTA per SM:
//
//   16 or 12 MMA warps   multiply, then the epilogue: a warp holds up and gate of 8 features of
//                        every pair; two warps exchange the activations of a group of 16 in shared
//                        memory
//   4 load warps         take turns at the stages, Wide two at a time: weights, and the rows of the
//                        tile's tokens, which the quantizer left dequantized as half
//
//   full[s] / empty[s]   load warps <-> MMA warps   (kShares + 1 + bytes / kMmaWarps arrivals)
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
#include "ptx/arithmetic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/elect.cuh"
#include "ptx/pdl.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tensor_copy.cuh"

namespace cake::fc1 {

template <class Shape>
struct Prefill : Shape {
  static constexpr int kHidden = 3584;
  static constexpr int kIntermediate = 384;
  static constexpr int kRows = Shape::kWarpgroups * grouped_mma::kWarpgroupRows;
  static constexpr int kParts = 2 * kIntermediate / kRows;  // items of a tile
  static constexpr int kUnits = kHidden / grouped_mma::kUnitColumns;
  static constexpr int kUnitBytes = grouped_mma::kUnitColumns / 2;       // of a weight row
  static constexpr int kScaleBytes = 2 * grouped_mma::kScaleBlockBytes;  // 128 rows of a unit
  static constexpr int kScaleBlocks = 2;  // of 128 rows, that an item has rows in
  static constexpr int kChunkPairs = 32;  // pairs whose activations are exchanged at a time

  // A stage is filled by kShares load warps; those of the next one are others, kTurns in all.
  static constexpr int kStages = Shape::kWarpgroups == 4 ? 5 : 3;
  static constexpr int kTurns = Shape::kWarpgroups == 4 ? 4 : 2;
  static constexpr int kShares = grouped_mma::kLoadWarps / kTurns;
  // When a load warp waits for a stage, the use before the last of that stage has been released, so
  // that a parity is never ambiguous.
  static_assert(kTurns < kStages, "parity would be ambiguous");
  static_assert(kUnits % kTurns == 0, "turns go by the item's units");
  static_assert(Shape::kTilePairs / 8 % kShares == 0, "shares are whole groups of eight rows");

  // The item's first row within its first scale block.
  __device__ __forceinline__ static int32_t first_scale_block(int32_t part) {
    return part * kRows / 128;
  }
  __device__ __forceinline__ static int32_t first_row_of_block(int32_t part) {
    return part * kRows % 128;
  }
};

// What the MMA warps need to know of an item.
template <class Config>
struct PrefillItem {
  int32_t count;  // pairs; 0 after the last item
  int32_t part;
  float alpha;    // undoes the dequantization factors as well
  float q_scale;  // encoding scale of the intermediate
  float beta, linear_beta;
  alignas(16) int32_t pair_ids[32 * Config::kPairRegisters];
};

template <class Config>
struct PrefillStorage {
  struct Stage {
    grouped_mma::PairUnit<Config::kTilePairs> pairs;
    uint8_t codes[Config::kRows][Config::kUnitBytes];
    uint8_t scales[Config::kScaleBlocks][Config::kScaleBytes];  // 512 bytes hold 4 columns
  } stages[Config::kStages];
  // Of two warps each: 16 features of a pair in a row, 16-byte chunk c at c ^ (pair / 2 % 4).
  float activations[Config::kMmaWarps / 2][Config::kChunkPairs][16];
  PrefillItem<Config> items[2];
  // Of each load warp: the tokens of rows 0, 2, 4, 6, then 1, 3, 5, 7 of every eight of its item;
  // rows beyond the last repeat token 0.
  alignas(16) uint32_t tokens[grouped_mma::kLoadWarps][Config::kTilePairs];
  uint64_t full[Config::kStages];
  uint64_t empty[Config::kStages];
  uint64_t item_full[2];
  static_assert(sizeof(Stage) % 1024 == 0, "a stage must keep the swizzle's alignment");
};

// Describes item `index` to the MMA warps. `pairs`: ids, 32 in a register.
template <class Config>
__device__ __forceinline__ void publish_item(const Params& params, PrefillStorage<Config>& shared,
                                             int32_t index, const Tile& tile, int32_t part,
                                             const int32_t (&pairs)[Config::kPairRegisters],
                                             int32_t lane) {
  PrefillItem<Config>& item = shared.items[index % 2];
#pragma unroll
  for (int i = 0; i < Config::kPairRegisters; ++i) {
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

// Fills its share of every kTurns-th stage: weights by bulk copies (the first share), the rows of
// the pairs' tokens in pieces of 16 bytes, since their chunks change places.
template <class Config>
__device__ __forceinline__ void load_warp(const Params& params, const CUtensorMap& w13_map,
                                          PrefillStorage<Config>& shared, const DealtItems& items,
                                          int32_t warp, int32_t lane) {
  using namespace grouped_mma;
  constexpr int kTokenBytes = Config::kHidden * 2;
  constexpr int kScaleRowBlockBytes = 128 * Config::kHidden / 16;
  constexpr int kExpertScaleBlocks = 2 * Config::kIntermediate / 128;
  constexpr int kShareGroups = Config::kTilePairs / 8 / Config::kShares;
  const int32_t turn = warp % Config::kTurns;
  const int32_t share = warp / Config::kTurns;
  const uint64_t policy = ptx::createpolicy_evict_normal();
  uint32_t first_use = 0;  // of a stage, by the item
  uint32_t* const tokens = shared.tokens[warp];
  TileCursor cursor(items);
  for (; cursor.tile().count > 0; cursor.advance(), first_use += Config::kUnits) {
    const int32_t count = cursor.tile().count;
    const int32_t first_row =
        cursor.tile().expert * (2 * Config::kIntermediate) + cursor.part() * Config::kRows;
    const uint8_t* const scales =
        params.w13_sf + int64_t{cursor.tile().expert * kExpertScaleBlocks +
                                Config::first_scale_block(cursor.part())} *
                            kScaleRowBlockBytes;
    int32_t pairs[Config::kPairRegisters];
#pragma unroll
    for (int i = 0; i < Config::kPairRegisters; ++i) {
      const int32_t n = lane + 32 * i;
      pairs[i] = n < count ? params.expert_pairs[cursor.tile().first + n] : -1;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Config::kPairRegisters; ++i) {
      const int32_t n = lane + 32 * i;
      if (n < Config::kTilePairs) {
        tokens[n / 8 * 8 + n % 2 * 4 + n / 2 % 4] =
            pairs[i] >= 0 ? static_cast<uint32_t>(pairs[i]) / 16 : 0;
      }
    }
    __syncwarp();
    if (warp == 0) {
      publish_item(params, shared, cursor.index(), cursor.tile(), cursor.part(), pairs, lane);
    }
    for (int32_t k = turn; k < Config::kUnits; k += Config::kTurns) {
      const Slot<Config::kStages> slot(first_use + k);
      typename PrefillStorage<Config>::Stage& stage = shared.stages[slot.stage];
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[slot.stage]), slot.parity ^ 1);
      const uint32_t full = ptx::shared_address(&shared.full[slot.stage]);
      if (share == 0 && ptx::elect_sync()) {
        ptx::mbarrier_arrive_expect_tx(full, sizeof(stage.codes) + sizeof(stage.scales));
        ptx::cp_async_bulk_tensor_2d(ptx::shared_address(stage.codes), w13_map,
                                     k * Config::kUnitBytes, first_row, full);
        for (int i = 0; i < Config::kScaleBlocks; ++i) {
          ptx::cp_async_bulk(ptx::shared_address(stage.scales[i]),
                             scales + i * kScaleRowBlockBytes + k * Config::kScaleBytes,
                             Config::kScaleBytes, full, policy);
        }
      }
      __syncwarp();
      // Two rows at a time; lanes 0 .. 15 the even one.
      const uint32_t destination = ptx::shared_address(stage.pairs.blocks[lane / 8 % 2]) +
                                   share * (kShareGroups * 1024) + lane / 16 * kPairRowBytes +
                                   (lane % 8 ^ lane / 16) * 16;
      const uint8_t* const halves =
          ptx::opaque(params.halves + (k * (kUnitColumns * 2) + lane % 16 * 16));
      const int32_t own_count = count - share * (kShareGroups * 8);
      const uint32_t* const own_tokens = tokens + share * (kShareGroups * 8) + lane / 16 * 4;
#pragma unroll
      for (int i = 0; i < kShareGroups; ++i) {
        if (8 * i >= own_count) {
          break;
        }
        const uint4 four = *reinterpret_cast<const uint4*>(own_tokens + 8 * i);
        const uint32_t rows[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          ptx::cp_async_16((destination ^ 2 * m * 16) + (8 * i + 2 * m) * kPairRowBytes,
                           halves + uint64_t{rows[m]} * kTokenBytes);
        }
      }
      ptx::cp_async_wait_all();
      ptx::fence_proxy_async();  // wgmma reads by the asynchronous proxy
      release(shared.full[slot.stage], lane);
    }
  }
  if (warp == 0) {  // count 0: the end
    const int32_t index = cursor.index();
    if (lane == 0) {
      shared.items[index % 2].count = 0;
    }
    release(shared.item_full[index % 2], lane);
  }
}

// Sums of the item's rows over all columns.
template <int N, class Config>
__device__ __forceinline__ void multiply_item(PrefillStorage<Config>& shared,
                                              RingPosition<Config::kStages>& ring, int32_t part,
                                              int32_t warp, int32_t lane,
                                              float (&sums)[Config::kTilePairs / 2]) {
  using namespace grouped_mma;
  const int32_t row = LaneRow(warp, lane).row();
  const int32_t t = lane % 4;
  const int32_t codes_offset = (warp / 2 * 32 + row) * Config::kUnitBytes + t * 16;
  const int32_t block_row = Config::first_row_of_block(part) + warp / 2 * 32;  // a multiple of 32
  const int32_t scales_offset = block_row / 128 * Config::kScaleBytes + t / 2 * kScaleBlockBytes +
                                row * 16 + block_row / 32 % 4 * 4 + t % 2 * 2;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    sums[i] = 0.0f;
  }
  RawUnit raw;
  const auto load = [&](const RingPosition<Config::kStages>& position) {
    const typename PrefillStorage<Config>::Stage& stage = shared.stages[position.stage];
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[position.stage]), position.parity);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      raw.codes[r] = *reinterpret_cast<const uint4*>(stage.codes[0] + codes_offset +
                                                     r * 8 * Config::kUnitBytes);
      raw.scales[r] = *reinterpret_cast<const uint16_t*>(stage.scales[0] + scales_offset + r * 128);
    }
  };
  load(ring);
#pragma unroll 4  // 2 % at 73 pairs per expert: fewer ring addresses to compute
  for (int32_t k = 0; k < Config::kUnits; ++k) {
    const int32_t stage = ring.stage;
    Fragments fragments;
    multiply_unit<N>(raw, ptx::shared_address(&shared.stages[stage].pairs), fragments, sums);
    ring.advance();
    if (k + 1 < Config::kUnits) {
      load(ring);
    }
    ptx::wgmma_wait_all<N>(sums);
    release(shared.empty[stage], lane);
  }
}

// Requantizes (recipe Q') and stores the item's features of the tile's pairs. After the
// exchange, lane l of a warp has half a group (8 features) of pair 16 (warp % 2) + l % 16 of the
// chunk, lane l ^ 16 the other half.
template <class Config>
__device__ __forceinline__ void store_features(const Params& params, PrefillStorage<Config>& shared,
                                               const PrefillItem<Config>& item, int32_t warp,
                                               int32_t lane,
                                               const float (&sums)[Config::kTilePairs / 2]) {
  using namespace grouped_mma;
  const int32_t t = lane % 4;
  const int32_t feature = LaneRow(warp, lane).feature();
  const int32_t group = item.part * (Config::kRows / 32) + warp / 2;
  const int32_t count = item.count;
  const float alpha = item.alpha;
  const float q_scale = item.q_scale;
  const SituConstants constants(item.beta, item.linear_beta);
  const int32_t half = lane / 16;
  const int32_t partners = 1 + warp / 2;
  float (&activations)[Config::kChunkPairs][16] = shared.activations[warp / 2];
#pragma unroll
  for (int chunk = 0; chunk < Config::kPairRegisters; ++chunk) {
    const int first = chunk * Config::kChunkPairs;
    if (first < count) {
      const int32_t n = warp % 2 * 16 + lane % 16;
#pragma unroll
      for (int i = 0; i < Config::kChunkPairs / 8; ++i) {
        const int j = first / 8 + i;
        if (j < Config::kTilePairs / 8 && 8 * j < count) {
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
        *reinterpret_cast<uint32_t*>(params.packed + pair * (Config::kIntermediate / 2) +
                                     group * 8 + half * 4) = codes;
        if (half == 0) {
          params.sf[pair * (Config::kIntermediate / 16) + group] = static_cast<uint8_t>(scale.sf);
        }
      }
    }
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    cake_fc1_prefill_sm90(const __grid_constant__ Params params,
                          const __grid_constant__ CUtensorMap w13_map) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  __trap();  // the plan never picks this kernel elsewhere
#else
  using Config = Prefill<Shape>;
  extern __shared__ __align__(1024) uint8_t fc1_prefill_storage[];
  using Storage = PrefillStorage<Config>;
  static_assert(sizeof(Storage) <= 232448, "shared memory exceeds 227 KB");
  Storage& shared = swizzled_storage<Storage>(fc1_prefill_storage);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Config::kStages; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[s]), Config::kShares + 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[s]), Config::kMmaWarps);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&shared.item_full[i]), 1);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (warp >= Config::kMmaWarps) {
    ptx::setmaxnreg_dec<Config::kLoadRegisters>();
    const DealtItems items{params.tiles, *params.num_tiles, Config::kParts};
    load_warp(params, w13_map, shared, items, warp - Config::kMmaWarps, lane);
    return;
  }
  ptx::setmaxnreg_inc<Config::kMmaRegisters>();
  RingPosition<Config::kStages> ring;
  for (RingPosition<2> i;; i.advance()) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.item_full[i.stage]), i.parity);
    const PrefillItem<Config>& item = shared.items[i.stage];
    if (item.count == 0) {
      break;
    }
    float sums[Config::kTilePairs / 2];
    grouped_mma::with_columns<Config>(
        item.count, [&]<int N>() { multiply_item<N>(shared, ring, item.part, warp, lane, sums); });
    store_features(params, shared, item, warp, lane, sums);
  }
#endif
}

}  // namespace cake::fc1
