// FC2 for few pairs per expert, sm_90a: bound by the weight stream. One BF16 row per pair.
//
// Work is the list of 128-row blocks of all tiles, in prepared order. An item is a run of blocks of
// one tile that its CTA has been dealt or has claimed (common/work_pool.cuh); one CTA per SM. 17
// warps:
//
//   load thread   takes the items and describes them; 128 rows x 192 B and their scales (3072 B)
//                 per stage: two contiguous bulk copies
//   16 MMA warps  in four groups; group i takes every fourth block of the CTA's. A warp has 32 rows
//                 of the block and keeps the tile's intermediate (at most 8 pairs) in 48 registers
//                 while it walks the blocks of the item
//
//   item_full / _empty[i]  load thread <-> all MMA warps: description i   (1 / 16 arrivals)
//   full[s]                load thread -> one MMA group: stage s holds data  (1 arrival + bytes)
//   empty[s]               that group -> load thread                         (4 arrivals)
//
// The number of stages is a multiple of the number of groups: a stage always belongs to one group,
// which therefore sees every phase of its barriers. An MMA warp reads every description, also of an
// item that has no block for its group, and the load thread fills all places in turn: they see
// every phase of item_full and item_empty. While the load thread waits for a place or for a stage
// in item i, all items before are described and their blocks are copied or on their way, which is
// all that the MMA warps need to give back that place or stage.
//
// Weights, tile list and counter do not depend on FC1 (which released this grid only after routing
// had finished), so the weights start before the wait.
#pragma once

#include <cstdint>

#include "common/pipeline.cuh"
#include "common/tile.cuh"
#include "common/work_pool.cuh"
#include "fc2/decode_block_sm90.cuh"
#include "fc2/params.h"
#include "ptx/bulk_copy.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/pdl.cuh"

namespace cake::fc2 {

struct Decode : DecodeBlock {
  static constexpr int kBlockRows = kScaleRows;
  static constexpr int kExpertBlocks = kHidden / kBlockRows;
  static constexpr int kMmaGroups = 4;
  static constexpr int kMmaWarps = 4 * kMmaGroups;
  static constexpr int kThreads = (kMmaWarps + 1) * 32;
  static constexpr int kStages = 8;
  static constexpr int kItems = 8;  // of a block or more: as many as fill the stages
  static constexpr int kWeightBytes = kBlockRows * kRowBytes;
};
static_assert(Decode::kStages % Decode::kMmaGroups == 0, "a stage must belong to one MMA group");

struct DecodeStorage {
  struct Stage {
    uint8_t weights[Decode::kWeightBytes];
    uint8_t scales[Decode::kScaleBytes];
  } stages[Decode::kStages];
  struct alignas(16) Item {
    int32_t expert;
    int32_t first;  // index into expert_pairs
    int32_t count;  // pairs; 0 after the last item
    int32_t block;  // its first block of the launch's is the CTA's use `first_use` of a stage
    int32_t first_use;
    int32_t end_use;
  } items[Decode::kItems];
  uint64_t item_full[Decode::kItems];
  uint64_t item_empty[Decode::kItems];
  uint64_t full[Decode::kStages];
  uint64_t empty[Decode::kStages];
};
static_assert(sizeof(DecodeStorage) <= 232448, "shared memory exceeds 227 KB");

__device__ __forceinline__ void load_thread(const Params& params, DecodeStorage& shared) {
  const uint64_t policy = ptx::createpolicy_evict_first();
  WorkCursor cursor(params.tiles, load_num_tiles(params.num_tiles), params.num_blocks, params.pool,
                    params.work_counter);
  TileBlocks work = cursor.next();
  RingPosition<Decode::kStages> ring;
  int32_t use = 0;
#pragma unroll 1
  for (RingPosition<Decode::kItems> i;; i.advance()) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.item_empty[i.stage]), i.parity ^ 1);
    const Tile& tile = work.tile;
    const int32_t end_use = use + work.end - work.begin;
    shared.items[i.stage] = {tile.expert, tile.first, tile.count, work.begin, use, end_use};
    ptx::mbarrier_arrive(ptx::shared_address(&shared.item_full[i.stage]));
    if (tile.count == 0) {
      break;
    }
    int64_t index = int64_t{tile.expert} * Decode::kExpertBlocks + params.first_block + work.begin;
    TileBlocks next{};
#pragma unroll 1
    for (; use < end_use; ++use, ++index, ring.advance()) {
      if (use + 1 == end_use) {
        next = cursor.next();
      }
      DecodeStorage::Stage& stage = shared.stages[ring.stage];
      const uint32_t full = ptx::shared_address(&shared.full[ring.stage]);
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, Decode::kWeightBytes + Decode::kScaleBytes);
      ptx::cp_async_bulk(ptx::shared_address(stage.weights),
                         params.w2 + index * Decode::kWeightBytes, Decode::kWeightBytes, full,
                         policy);
      ptx::cp_async_bulk(ptx::shared_address(stage.scales),
                         params.w2_sf + index * Decode::kScaleBytes, Decode::kScaleBytes, full,
                         policy);
    }
    work = next;
  }
}

__device__ __forceinline__ void mma_warp(const Params& params, DecodeStorage& shared, int32_t warp,
                                         int32_t lane) {
  const int32_t quarter = warp % 4;  // of a block: this warp's 32 rows
  const int32_t g = lane / 4;
  const int32_t t = lane % 4;
  constexpr uint32_t kBlockBytes = Decode::kBlockRows * 2;  // of an output row
  const uint32_t row_bytes = params.num_blocks * kBlockBytes;
  constexpr uint32_t kNone = 0xFFFFFFFF;
  int32_t use = warp / 4;  // of a stage, that comes next; every fourth one is of this group
#pragma unroll 1
  for (uint32_t i = 0;; ++i) {
    const Slot<Decode::kItems> place(i);
    ptx::mbarrier_wait(ptx::shared_address(&shared.item_full[place.stage]), place.parity);
    const DecodeStorage::Item item = shared.items[place.stage];
    release_loaded(shared.item_empty[place.stage], lane, item.expert, item.first, item.count,
                   item.block, item.first_use, item.end_use);
    if (item.count == 0) {
      break;
    }
    if (use >= item.end_use) {  // no block for this group
      continue;
    }
    // Bytes from params.rows to this lane's outputs of its two pairs, columns 2t and 2t + 1, for
    // use 0 of a stage; less than kFc2RowsBytes with the use that is added.
    uint32_t outputs[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      outputs[j] = 2 * t + j < item.count
                       ? params.expert_pairs[item.first + 2 * t + j] * row_bytes +
                             (item.block - item.first_use) * kBlockBytes +
                             (quarter * Decode::kRows + 4 * g) * 2
                       : kNone;
    }
    // Undoes the dequantization factors as well.
    const float alpha = params.fc2_alpha[item.expert] * kDequantizedSquare;
    const int64_t pair = g < item.count ? params.expert_pairs[item.first + g] : -1;
    const DecodePairs pairs(params, pair, lane);
#pragma unroll 1
    for (; use < item.end_use; use += Decode::kMmaGroups) {
      const Slot<Decode::kStages> slot(static_cast<uint32_t>(use));
      ptx::mbarrier_wait(ptx::shared_address(&shared.full[slot.stage]), slot.parity);
      const DecodeStorage::Stage& stage = shared.stages[slot.stage];
      const DecodeSums sums(stage.weights + quarter * Decode::kRows * Decode::kRowBytes,
                            stage.scales, quarter, pairs, lane);
      release_after(shared.empty[slot.stage], lane, sums.loaded());
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (outputs[j] != kNone) {
          *reinterpret_cast<uint2*>(reinterpret_cast<uint8_t*>(params.rows) +
                                    (outputs[j] + use * kBlockBytes)) = sums.outputs(j, alpha);
        }
      }
    }
  }
}

__global__ void __launch_bounds__(Decode::kThreads, 1)
    cake_fc2_decode_sm90(const __grid_constant__ Params params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  __trap();  // the plan never picks this kernel elsewhere
#else
  extern __shared__ __align__(128) uint8_t fc2_decode_storage[];
  DecodeStorage& shared = *reinterpret_cast<DecodeStorage*>(fc2_decode_storage);
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Decode::kItems; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&shared.item_full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.item_empty[i]),
                         Decode::kMmaWarps * kWarpArrivals);
    }
    for (int s = 0; s < Decode::kStages; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[s]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[s]), 4 * kWarpArrivals);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  if (warp < Decode::kMmaWarps) {
    ptx::griddepcontrol_wait();
    mma_warp(params, shared, warp, lane);
  } else if (ptx::elect_sync()) {
    load_thread(params, shared);
  }
#endif
}

}  // namespace cake::fc2
