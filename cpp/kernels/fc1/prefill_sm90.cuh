// FC1 + SiTU + requantize for many pairs per expert, sm_90a, on common/grouped_mma_sm90.cuh.
//
// Item = (tile, kRows prepared rows): half as many features of the tile's pairs, 128 of up to 64
// (Short) or 88 (Narrow), or 96 of up to 176 (Wide). CTA c takes items c, c + grid, ... so that the
// items of a tile run at the same time and read its tokens from L2; those of the last round are
// dealt in halves, unless they are too many or Wide. One CTA per SM:
//
//   16 or 12 MMA warps   multiply, then the epilogue: a warp holds up and gate of 8 features of
//                        every pair; two warps exchange the activations of a group of 16 in shared
//                        memory
//   4 load warps         take turns at the stages, Short and Wide two at a time: weights, and the
//                        rows of the tile's tokens, which the quantizer left dequantized as half
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
#include "fc1/prefill_config_sm90.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/elect.cuh"
#include "ptx/pdl.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tensor_copy.cuh"

namespace cake::fc1 {

// Describes item `index` to the MMA warps. `pairs`: ids, 32 in a register.
template <class Config>
__device__ __forceinline__ void publish_item(const Params& params, PrefillStorage<Config>& shared,
                                             int32_t index, const Tile& tile, int32_t first_row,
                                             int32_t rows,
                                             const int32_t (&pairs)[Config::kPairRegisters],
                                             int32_t lane) {
  PrefillItem<Config>& item = shared.items[index % 2];
#pragma unroll
  for (int i = 0; i < Config::kPairRegisters; ++i) {
    item.pair_ids[lane + 32 * i] = pairs[i];
  }
  if (lane == 0) {
    item.count = tile.count;
    item.first_row = first_row;
    item.rows = rows;
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
                                          PrefillStorage<Config>& shared,
                                          const typename Config::Items& items, int32_t warp,
                                          int32_t lane) {
  using namespace grouped_mma;
  constexpr int kTokenBytes = Config::kHidden * 2;
  constexpr int kUnitBytes = kUnitColumns * 2;  // of a token
  constexpr int kScaleRowBlockBytes = 128 * Config::kHidden / 16;
  constexpr int kExpertScaleBlocks = 2 * Config::kIntermediate / 128;
  constexpr int kShareGroups = Config::kTilePairs / 8 / Config::kShares;
  const int32_t turn = warp % Config::kTurns;
  const int32_t share = warp / Config::kTurns;
  const uint64_t policy = ptx::createpolicy_evict_normal();
  uint32_t first_use = 0;  // of a stage, by the item
  uint32_t* const tokens = shared.tokens[warp];
  TileCursor<typename Config::Items> cursor(items);
  for (; cursor.tile().count > 0; cursor.advance(), first_use += Config::kItemStages) {
    const int32_t count = cursor.tile().count;
    int32_t boxes = Config::kBoxes;
    int32_t expert_row = cursor.part() * Config::kRows;
    if constexpr (Config::kHalves) {
      boxes = cursor.is_half() ? 1 : Config::kBoxes;
      expert_row += cursor.half() * Config::kBoxRows;
    }
    const int32_t first_row = cursor.tile().expert * (2 * Config::kIntermediate) + expert_row;
    const uint8_t* const scales =
        params.w13_sf +
        int64_t{cursor.tile().expert * kExpertScaleBlocks + expert_row / 128} * kScaleRowBlockBytes;
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
      publish_item(params, shared, cursor.index(), cursor.tile(), expert_row,
                   boxes * Config::kBoxRows, pairs, lane);
    }
    for (int32_t k = turn; k < Config::kItemStages; k += Config::kTurns) {
      const Slot<Config::kStages> slot(first_use + k);
      typename PrefillStorage<Config>::Stage& stage = shared.stages[slot.stage];
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[slot.stage]), slot.parity ^ 1);
      const uint32_t full = ptx::shared_address(&shared.full[slot.stage]);
      if (share == 0 && ptx::elect_sync()) {
        constexpr uint32_t kBytes = sizeof(stage.codes) + sizeof(stage.scales);
        ptx::mbarrier_arrive_expect_tx(full, boxes * (kBytes / Config::kBoxes));
        for (int i = 0; i < boxes; ++i) {
          ptx::cp_async_bulk_tensor_2d(ptx::shared_address(stage.codes[i * Config::kBoxRows]),
                                       w13_map, k * Config::kRowBytes,
                                       first_row + i * Config::kBoxRows, full);
        }
        for (int i = 0; i < boxes * (Config::kScaleBlocks / Config::kBoxes); ++i) {
          ptx::cp_async_bulk(ptx::shared_address(stage.scales[i]),
                             scales + i * kScaleRowBlockBytes + k * Config::kScaleBytes,
                             Config::kScaleBytes, full, policy);
        }
      }
      __syncwarp();
      // Two rows at a time; lanes 0 .. 15 the even one.
      const uint32_t destination = ptx::shared_address(stage.pairs[0].blocks[lane / 8 % 2]) +
                                   share * (kShareGroups * 1024) + lane / 16 * kPairRowBytes +
                                   (lane % 8 ^ lane / 16) * 16;
      const uint8_t* const halves =
          ptx::opaque(params.halves + (k * (Config::kStageUnits * kUnitBytes) + lane % 16 * 16));
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
          const uint8_t* const source = halves + uint64_t{rows[m]} * kTokenBytes;
#pragma unroll
          for (int u = 0; u < Config::kStageUnits; ++u) {
            ptx::cp_async_16((destination ^ 2 * m * 16) + (8 * i + 2 * m) * kPairRowBytes +
                                 u * static_cast<int>(sizeof(stage.pairs[0])),
                             source + u * kUnitBytes);
          }
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

// Lets an item pass in a warp that has no rows of it: half an item, which is the last.
template <class Config>
__device__ __forceinline__ void skip_last_item(PrefillStorage<Config>& shared,
                                               RingPosition<Config::kStages> ring, int32_t lane) {
  for (int32_t k = 0; k < Config::kItemStages; ++k, ring.advance()) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[ring.stage]), ring.parity);
    release(shared.empty[ring.stage], lane);
  }
}

// Sums of the item's rows over all columns.
template <int N, class Config>
__device__ __forceinline__ void multiply_item(PrefillStorage<Config>& shared,
                                              RingPosition<Config::kStages>& ring,
                                              int32_t first_row, int32_t warp, int32_t lane,
                                              float (&sums)[Config::kTilePairs / 2]) {
  using namespace grouped_mma;
  const int32_t row = LaneRow<Config::kSwizzled>(warp, lane).row();
  const int32_t t = lane % 4;
  const int32_t codes_offset =
      (warp / 2 * 32 + row) * Config::kRowBytes + (Config::kSwizzled ? t ^ row % 8 : t) * 16;
  const int32_t block_row = first_row % 128 + warp / 2 * 32;  // a multiple of 32
  const int32_t scales_offset = block_row / 128 * Config::kScaleBytes + t / 2 * kScaleBlockBytes +
                                row * 16 + block_row / 32 % 4 * 4 + t % 2 * 2;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    sums[i] = 0.0f;
  }
  RawUnit raw;
  const auto load = [&](int u) {
    const typename PrefillStorage<Config>::Stage& stage = shared.stages[ring.stage];
    if (u == 0) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.full[ring.stage]), ring.parity);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      raw.codes[r] = *reinterpret_cast<const uint4*>(stage.codes[r * 8] + (codes_offset ^ u * 64));
      raw.scales[r] = *reinterpret_cast<const uint16_t*>(stage.scales[0] + scales_offset + r * 128 +
                                                         u * Config::kUnitScaleBytes);
    }
  };
  load(0);
#pragma unroll 4 / Config::kStageUnits  // 2 % at 73 pairs per expert: fewer addresses to compute
  for (int32_t k = 0; k < Config::kItemStages; ++k) {
    const int32_t stage = ring.stage;
#pragma unroll
    for (int u = 0; u < Config::kStageUnits; ++u) {
      Fragments fragments;
      multiply_unit<N>(raw, ptx::shared_address(&shared.stages[stage].pairs[u]), fragments, sums);
      if (u + 1 < Config::kStageUnits) {
        load(u + 1);
      } else {
        ring.advance();
        if (k + 1 < Config::kItemStages) {
          load(0);
        }
      }
      ptx::wgmma_wait_all<N>(sums);
    }
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
  const int32_t feature = LaneRow<Config::kSwizzled>(warp, lane).feature();
  const int32_t group = item.first_row / 32 + warp / 2;
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
      ptx::mbarrier_init(ptx::shared_address(&shared.full[s]), Config::kShares * kWarpArrivals + 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[s]), Config::kMmaWarps * kWarpArrivals);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&shared.item_full[i]), kWarpArrivals);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (warp >= Config::kMmaWarps) {
    ptx::setmaxnreg_dec<Config::kLoadRegisters>();
    const typename Config::Items items(DealtItems{params.tiles, *params.num_tiles, Config::kParts});
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
    if (Config::kHalves && warp * 16 >= item.rows) {
      skip_last_item(shared, ring, lane);
      break;
    }
    float sums[Config::kTilePairs / 2];
    grouped_mma::with_columns<Config>(item.count, [&]<int N>() {
      multiply_item<N>(shared, ring, item.first_row, warp, lane, sums);
    });
    store_features(params, shared, item, warp, lane, sums);
  }
#endif
}

}  // namespace cake::fc1
