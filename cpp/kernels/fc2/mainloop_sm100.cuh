// From memory to sums in tensor memory: the load thread, the token warp and the MMA thread of FC2
// on sm_100a and sm_103a. Chart: kernel_sm100.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/layout.h"
#include "common/model.cuh"
#include "common/pipeline.cuh"
#include "common/tcgen05_layout.h"
#include "common/work_pool.cuh"
#include "fc2/config_sm100.cuh"
#include "fc2/params.h"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/pdl.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tensor_copy.cuh"

namespace cake::fc2 {

// Waits for the commits of a ring's last uses: none may arrive after the CTA's end.
template <int kStages>
__device__ __forceinline__ void wait_all_empty(uint64_t (&empty)[kStages],
                                               RingPosition<kStages> ring) {
  for (int s = 0; s < kStages; ++s, ring.advance()) {
    ptx::mbarrier_wait(ptx::shared_address(&empty[ring.stage]), ring.parity ^ 1);
  }
}

// One thread. Takes the items and describes them; weights and their scales of every block.
template <int kN>
__device__ __forceinline__ void load_weights(const Params& params, const CUtensorMap& w2_map,
                                             Sm100Storage<kN>& shared) {
  using Config = Sm100<kN>;
  const int32_t num_tiles = load_num_tiles(params.num_tiles);
  // With more tiles than experts, weights are read again soon.
  const uint64_t policy = num_tiles > Config::kExperts ? ptx::createpolicy_evict_normal()
                                                       : ptx::createpolicy_evict_first();
  WorkCursor cursor(params.tiles, num_tiles, params.num_blocks, params.pool, params.work_counter);
  TileBlocks work = cursor.next();
  RingPosition<Config::kStages> ring;
#pragma unroll 1
  for (RingPosition<Config::kItems> i;; i.advance()) {
    typename Config::Item& item = shared.items[i.stage];
    ptx::mbarrier_wait(ptx::shared_address(&shared.item_empty[i.stage]), i.parity ^ 1);
    item.expert = work.tile.expert;
    item.first = work.tile.first;
    item.count = work.tile.count;
    item.begin = work.begin;
    item.end = work.end;
    ptx::mbarrier_arrive(ptx::shared_address(&shared.item_full[i.stage]));
    if (work.tile.count == 0) {
      break;
    }
    const int32_t first = work.tile.expert * Config::kExpertBlocks + params.first_block;
    TileBlocks next{};
#pragma unroll 1
    for (int32_t block = work.begin; block < work.end; ++block) {
      if (block + 1 == work.end) {  // looked up while this block waits for its stage
        next = cursor.next();
      }
      typename Config::Stage& stage = shared.stages[ring.stage];
      const uint32_t full = ptx::shared_address(&shared.full[ring.stage]);
      if (!model::planted(PlantedBug::kStageReuse)) {
        ptx::mbarrier_wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
      }
      ptx::mbarrier_arrive_expect_tx(full, sizeof(stage.weights) + sizeof(stage.scales));
#pragma unroll
      for (int line = 0; line < Config::kLines; ++line) {
        ptx::cp_async_bulk_tensor_2d(ptx::shared_address(stage.weights[line]), w2_map,
                                     line * tcgen05::kLineBytes,
                                     (first + block) * Config::kBlockRows, full, policy);
      }
      ptx::cp_async_bulk(ptx::shared_address(stage.scales),
                         params.w2_sf + int64_t{first + block} * Config::kScaleBytes,
                         Config::kScaleBytes, full, policy);
      ring.advance();
    }
    work = next;
  }
  wait_all_empty(shared.empty, ring);
}

// What lane l of the token warp fetches of a tile: pairs l + 32 r, r = 0 .. 3.
template <int kN>
struct LaneTokens {
  static constexpr int kPairs = (kN + 31) / 32;
  static constexpr int kEights = Sm100<kN>::kScaleRowBytes / 8;
  uint32_t row_offsets[kPairs]{};
  uint2 scales[4][kEights]{};  // zeros beyond the last pair

  __device__ __forceinline__ LaneTokens(const Params& params, int32_t first, int32_t count,
                                        int32_t lane) {
    const int32_t row_bytes = params.num_blocks * Sm100<kN>::kBlockRows * 2;
#pragma unroll
    for (int r = 0; r < kPairs; ++r) {
      const int32_t n = lane + 32 * r;
      if (n < count) {
        // At most kFc2RowsBytes.
        row_offsets[r] = static_cast<uint32_t>(params.expert_pairs[first + n]) * row_bytes;
        const uint8_t* const row = params.input_sf + (first + n) * Sm100<kN>::kScaleRowBytes;
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
          scales[r][i] = __ldcg(reinterpret_cast<const uint2*>(row) + i);
        }
      }
    }
  }

  __device__ __forceinline__ void store_row_offsets(uint32_t (&offsets)[kN], int32_t lane) const {
#pragma unroll
    for (int r = 0; r < kPairs; ++r) {
      if (lane + 32 * r < kN) {
        offsets[lane + 32 * r] = row_offsets[r];
      }
    }
  }

  // A word of a row's scales belongs to one instruction; the lane's four lie side by side.
  __device__ __forceinline__ void store_scales(uint8_t* blocks, int32_t lane) const {
    const uint32_t address = ptx::shared_address(blocks) + scale_block_offset(lane, 0);
#pragma unroll
    for (int k = 0; k < Sm100<kN>::kSteps; ++k) {
      const auto word = [&](int r) { return k % 2 == 0 ? scales[r][k / 2].x : scales[r][k / 2].y; };
      ptx::st_shared(address + k * tcgen05::kScaleBlock,
                     make_uint4(word(0), word(1), word(2), word(3)));
    }
  }
};

// A whole warp. Of every item: the tile's rows, their scales as blocks of 128 x 4, and the rest of
// the description. What goes through registers is fetched before the wait for the slot.
template <int kN>
__device__ __forceinline__ void load_tokens(const Params& params, const CUtensorMap& input_map,
                                            Sm100Storage<kN>& shared, int32_t lane) {
  using Config = Sm100<kN>;
  constexpr int kGroupBytes = Config::kGroupPairs * tcgen05::kLineBytes;
  if (!model::planted(PlantedBug::kEarlyDependentRead)) {
    ptx::griddepcontrol_wait();
  }
  RingPosition<Config::kTokenSlots> slot;
#pragma unroll 1
  for (RingPosition<Config::kItems> i;; i.advance()) {
    typename Config::Item& item = shared.items[i.stage];
    ptx::mbarrier_wait(ptx::shared_address(&shared.item_full[i.stage]), i.parity);
    const int32_t first = item.first;
    const int32_t count = item.count;
    if (count == 0) {
      release(shared.item_ready[i.stage], lane);
      break;
    }
    const LaneTokens<kN> own(params, first, count, lane);
    const float alpha = params.fc2_alpha[item.expert];
    typename Config::Tokens& tokens = shared.tokens[slot.stage];
    const uint32_t full = ptx::shared_address(&shared.tokens_full[slot.stage]);
    ptx::mbarrier_wait(ptx::shared_address(&shared.tokens_empty[slot.stage]), slot.parity ^ 1);
    const int32_t columns = mma_columns<kN>(count);
    if (lane == 0) {
      item.alpha = alpha;
      ptx::mbarrier_arrive_expect_tx(full, columns * Config::kLines * tcgen05::kLineBytes);
    }
    __syncwarp();
    const int32_t group = lane / Config::kLines;
    const int32_t line = lane % Config::kLines;
    if (group * Config::kGroupPairs < columns) {
      ptx::cp_async_bulk_tensor_2d(ptx::shared_address(tokens.rows[line]) + group * kGroupBytes,
                                   input_map, line * tcgen05::kLineBytes,
                                   first + group * Config::kGroupPairs, full);
    }
    own.store_row_offsets(item.row_offsets, lane);
    own.store_scales(tokens.scales, lane);
    if (!model::planted(PlantedBug::kMissingProxyFence)) {
      ptx::fence_proxy_async();  // tcgen05.cp reads by the asynchronous proxy
    }
    release(shared.tokens_full[slot.stage], lane);
    release(shared.item_ready[i.stage], lane);
    slot.advance();
  }
  wait_all_empty(shared.tokens_empty, slot);
}

// Copies the scales of a block's instructions to tensor memory.
template <int kN>
__device__ __forceinline__ void copy_scales(uint32_t columns, uint64_t blocks) {
  using Config = Sm100<kN>;
#pragma unroll
  for (int k = 0; k < Config::kSteps; ++k) {
    ptx::tcgen05_cp_32x128b_warpx4(columns + k * Config::kStepColumns,
                                   tcgen05::advance(blocks, k * tcgen05::kScaleBlock));
  }
}

// The lines of an operand.
__device__ __forceinline__ uint64_t operand(const void* lines) {
  const uint32_t address = ptx::shared_address(lines);
  return model::planted(PlantedBug::kWrongSwizzle)
             ? tcgen05::MatrixDescriptor{address, 16, 1024, tcgen05::Swizzle::kNone}.encode()
             : tcgen05::operand_descriptor(address);
}

// One thread. All matrix instructions.
template <int kN>
__device__ __forceinline__ void multiply(Sm100Storage<kN>& shared, uint32_t tensor_memory) {
  using Config = Sm100<kN>;
  // Descriptors of the first stage and slot; the others lie at multiples of their sizes.
  const typename Config::Stage& stage = shared.stages[0];
  const typename Config::Tokens& tokens = shared.tokens[0];
  const uint64_t first_weights = operand(stage.weights);
  const uint64_t first_rows = operand(tokens.rows);
  const uint64_t first_stage_blocks = tcgen05::scale_descriptor(ptx::shared_address(stage.scales));
  const uint64_t first_slot_blocks = tcgen05::scale_descriptor(ptx::shared_address(tokens.scales));
  RingPosition<Config::kStages> ring;
  RingPosition<Config::kTokenSlots> slot;
  RingPosition<Config::kSums> sums;
#pragma unroll 1
  for (RingPosition<Config::kItems> i;; i.advance()) {
    const typename Config::Item& item = shared.items[i.stage];
    ptx::mbarrier_wait(ptx::shared_address(&shared.item_full[i.stage]), i.parity);
    if (item.count == 0) {
      break;
    }
    const int32_t columns = mma_columns<kN>(item.count);
    const int32_t blocks = item.end - item.begin;
    const uint32_t instruction =
        tcgen05::instruction_descriptor(columns - (model::planted(PlantedBug::kWrongN) ? 8 : 0));
    const uint32_t slot_offset = slot.stage * static_cast<uint32_t>(sizeof(tokens));
    const uint64_t rows = tcgen05::advance(first_rows, slot_offset);
    const uint32_t token_scales =
        tensor_memory + Config::kTokenScales + slot.stage * Config::kScaleColumns;
    ptx::mbarrier_wait(ptx::shared_address(&shared.tokens_full[slot.stage]), slot.parity);
    ptx::tcgen05_fence_after_thread_sync();
    copy_scales<kN>(token_scales, tcgen05::advance(first_slot_blocks, slot_offset));
#pragma unroll 1
    for (int32_t block = 0; block < blocks; ++block) {
      const uint32_t stage_offset = ring.stage * static_cast<uint32_t>(sizeof(stage));
      const uint64_t weights = tcgen05::advance(first_weights, stage_offset);
      const int32_t scale_stage = model::planted(PlantedBug::kScaleReuse) ? 0 : ring.stage;
      const uint32_t weight_scales =
          tensor_memory + Config::kWeightScales + scale_stage * Config::kScaleColumns;
      if (!model::planted(PlantedBug::kAccumulatorReuse)) {
        ptx::mbarrier_wait(ptx::shared_address(&shared.sums_empty[sums.stage]), sums.parity ^ 1);
      }
      if (!model::planted(PlantedBug::kMissingFullWait)) {
        ptx::mbarrier_wait(ptx::shared_address(&shared.full[ring.stage]), ring.parity);
      }
      if (!model::planted(PlantedBug::kMissingFenceAfter)) {
        ptx::tcgen05_fence_after_thread_sync();
      }
      copy_scales<kN>(weight_scales, tcgen05::advance(first_stage_blocks, stage_offset));
#pragma unroll
      for (int k = 0; k < Config::kSteps; ++k) {
        const int line = k / Config::kLineSteps;
        const int within = k % Config::kLineSteps * Config::kStepBytes;
        const int scale_step = model::planted(PlantedBug::kWrongScaleColumn) ? k + 1 : k;
        ptx::tcgen05_mma_mxf4nvf4_block16(
            tensor_memory + sums.stage * Config::kSumColumns,
            tcgen05::advance(weights, line * sizeof(stage.weights[0]) + within),
            tcgen05::advance(rows, line * sizeof(tokens.rows[0]) + within), instruction,
            weight_scales + scale_step * Config::kStepColumns,
            token_scales + k * Config::kStepColumns, k > 0);
      }
      ptx::tcgen05_commit(ptx::shared_address(&shared.empty[ring.stage]));
      if (block + 1 == blocks) {
        ptx::tcgen05_commit(ptx::shared_address(&shared.tokens_empty[slot.stage]));
      }
      ptx::tcgen05_commit(ptx::shared_address(&shared.sums_full[sums.stage]));
      ring.advance();
      sums.advance();
    }
    slot.advance();
  }
}

}  // namespace cake::fc2
