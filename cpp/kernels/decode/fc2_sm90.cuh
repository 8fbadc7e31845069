// FC2 of the decode kernel, sm_90a: bound by the weight stream. One BF16 row per pair.
//
// Work is the list of 128-row blocks of all tiles, in prepared order. An item is a run of blocks of
// one tile that its CTA has been dealt or has claimed (common/work_pool.cuh). All warps:
//
//   load thread   takes the items and describes them; 128 rows x 192 B and their scales (3072 B)
//                 per stage: two contiguous bulk copies
//   16 MMA warps  in four groups; group i takes every fourth block of the CTA's. A warp has 32 rows
//                 of the block and keeps the tile's intermediate (at most 8 pairs) in 48 registers
//                 while it walks the blocks of the item
//
//   item_full / _empty[i]  load thread <-> all MMA warps: description i   (1 / 16 arrivals)
//   fc2_full[s]            load thread -> one MMA group: stage s holds data  (1 arrival + bytes)
//   fc2_empty[s]           that group -> load thread                         (4 arrivals)
//   fc1_left               FC1's warps -> load thread and warp 17: the CTA is done with FC1, whose
//                          scales and sums are no longer in use              (15 arrivals)
//   fc1_done               warp 17 -> all MMA warps: so are all CTAs          (1 arrival)
//
// The number of stages is a multiple of the number of groups: a stage always belongs to one group,
// which therefore sees every phase of its barriers. An MMA warp reads every description, also of an
// item that has no block for its group, and the load thread fills all places in turn: they see
// every phase of item_full and item_empty. While the load thread waits for a place or for a stage
// in item i, all items before are described and their blocks are copied or on their way, which is
// all that the MMA warps need of it to give back that place or stage.
//
// The load thread begins when its last copy of FC1 has started: weights, tile list and counter do
// not depend on FC1.
#pragma once

#include <cstdint>

#include "common/pipeline.cuh"
#include "common/tile.cuh"
#include "common/work_pool.cuh"
#include "decode/fc2_block_sm90.cuh"
#include "decode/storage.cuh"
#include "fc2/params.h"
#include "ptx/bulk_copy.cuh"
#include "ptx/mbarrier.cuh"

namespace cake::decode {

// Waits until a stage may be filled for the use-th time of all stages. `fc1_ring`: its next stage.
__device__ __forceinline__ void wait_for_stage(Storage& shared, int32_t use,
                                               RingPosition<Fc1::kStages>& fc1_ring) {
  if (use < Fc1::kStages) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.fc1_empty[fc1_ring.stage]), fc1_ring.parity ^ 1);
    fc1_ring.advance();
  } else if (use < Fc2::kStages) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.fc1_left), 0);
  } else {
    const Slot<Fc2::kStages> slot(static_cast<uint32_t>(use));
    ptx::mbarrier_wait(ptx::shared_address(&shared.fc2_empty[slot.stage]), slot.parity ^ 1);
  }
}

// One thread. `fc1_ring`: the next stage of FC1's ring.
__device__ __forceinline__ void load_fc2(const fc2::Params& params, Storage& shared,
                                         RingPosition<Fc1::kStages> fc1_ring) {
  const int32_t first_slot = fc1_ring.stage;
  const uint64_t policy = ptx::createpolicy_evict_first();
  WorkCursor cursor(params.tiles, load_num_tiles(params.num_tiles), params.num_blocks, params.pool,
                    params.work_counter);
  TileBlocks work = cursor.next();
  int32_t use = 0;
#pragma unroll 1
  for (RingPosition<Fc2::kItems> i;; i.advance()) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.item_empty[i.stage]), i.parity ^ 1);
    const Tile& tile = work.tile;
    const int32_t end_use = use + work.end - work.begin;
    shared.items[i.stage] = {tile.expert, tile.first, tile.count, work.begin, use, end_use};
    ptx::mbarrier_arrive(ptx::shared_address(&shared.item_full[i.stage]));
    if (tile.count == 0) {
      break;
    }
    int64_t index = int64_t{tile.expert} * Fc2::kExpertBlocks + params.first_block + work.begin;
    TileBlocks next{};
#pragma unroll 1
    for (; use < end_use; ++use, ++index) {
      if (use + 1 == end_use) {
        next = cursor.next();
      }
      wait_for_stage(shared, use, fc1_ring);
      const int32_t stage = use % Fc2::kStages;
      const uint32_t weights = ptx::shared_address(shared.fc2_stage(stage, first_slot));
      const uint32_t full = ptx::shared_address(&shared.fc2_full[stage]);
      ptx::mbarrier_arrive_expect_tx(full, Fc2::kWeightBytes + Fc2::kScaleBytes);
      ptx::cp_async_bulk(weights, params.w2 + index * Fc2::kWeightBytes, Fc2::kWeightBytes, full,
                         policy);
      ptx::cp_async_bulk(weights + Fc2::kWeightBytes, params.w2_sf + index * Fc2::kScaleBytes,
                         Fc2::kScaleBytes, full, policy);
    }
    work = next;
  }
}

// One MMA warp. `first_slot`: where FC2's first stage lies.
__device__ __forceinline__ void multiply_fc2(const fc2::Params& params, Storage& shared,
                                             int32_t first_slot, int32_t warp, int32_t lane) {
  const int32_t quarter = warp % 4;  // of a block: this warp's 32 rows
  const int32_t g = lane / 4;
  const int32_t t = lane % 4;
  constexpr uint32_t kBlockBytes = Fc2::kBlockRows * 2;  // of an output row
  const uint32_t row_bytes = params.num_blocks * kBlockBytes;
  constexpr uint32_t kNone = 0xFFFFFFFF;
  int32_t use = warp / 4;  // of a stage, that comes next; every fourth one is of this group
#pragma unroll 1
  for (uint32_t i = 0;; ++i) {
    const Slot<Fc2::kItems> place(i);
    ptx::mbarrier_wait(ptx::shared_address(&shared.item_full[place.stage]), place.parity);
    const Fc2Item item = shared.items[place.stage];
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
                             (quarter * Fc2::kRows + 4 * g) * 2
                       : kNone;
    }
    // Undoes the dequantization factors as well.
    const float alpha = params.fc2_alpha[item.expert] * kDequantizedSquare;
    const int64_t pair = g < item.count ? params.expert_pairs[item.first + g] : -1;
    ptx::mbarrier_wait(ptx::shared_address(&shared.fc1_done), 0);
    const Fc2Pairs pairs(params, pair, lane);
#pragma unroll 1
    for (; use < item.end_use; use += Fc2::kMmaGroups) {
      const Slot<Fc2::kStages> slot(static_cast<uint32_t>(use));
      ptx::mbarrier_wait(ptx::shared_address(&shared.fc2_full[slot.stage]), slot.parity);
      const uint8_t* const weights = shared.fc2_stage(slot.stage, first_slot);
      Fc2Sums sums;
#pragma unroll
      for (int c = 0; c < 3; ++c) {
        sums.add(Fc2Fragments(weights + quarter * Fc2::kRows * Fc2::kRowBytes,
                              weights + Fc2::kWeightBytes, quarter, c, lane),
                 pairs, c);
      }
      release_after(shared.fc2_empty[slot.stage], lane, sums.loaded());
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

}  // namespace cake::decode
