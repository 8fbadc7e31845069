// FC1 + SiTU + requantize, sm_100a and sm_103a: block-scaled FP4 matrix instructions with prepared
// weight rows as their 128 rows and the pairs of a tile as their columns.
//
// Item = (tile, 128 prepared rows): 64 features of up to kN pairs; CTA c takes items c, c + grid,
// ... so that the six items of a tile run at the same time and read its tokens from L2. One CTA per
// SM, 10 warps:
//
//   4 epilogue warps   warp w: prepared rows 32w .. 32w + 31, one group of 16 features: SiTU,
//                      requantize, store
//   1 weight warp      one thread: codes by TMA, their scales by bulk copies
//   1 MMA warp         one thread: scales to tensor memory, matrix instructions
//   4 token warps      take turns at the stages: rows of the tile's tokens by gathering TMA, their
//                      scales through registers into blocks of 128 x 4
//
//   full[s] / empty[s]           weight and token warp <-> MMA   (3 arrivals + bytes / 1 commit)
//   sums_full / sums_empty[b]    MMA <-> epilogue                (1 commit / 4 arrivals)
//
// A stage is 256 columns of K, four instructions. Its scales have columns of tensor memory of their
// own, which the commit that gives the stage back guards as well: a copy of scales may overtake an
// earlier instruction that still reads what it overwrites.
//
// The instructions have as many columns as the tile has pairs, rounded up to 8; kN is only what a
// stage has room for. Beyond the last pair token rows are zeros, and nothing is stored.
//
// The rows of the result are in the order of expert_pairs, so that FC2 copies a tile's at once.
//
// Waits for routing before the first read, then releases the dependents.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/items.cuh"
#include "common/model.cuh"
#include "common/pipeline.cuh"
#include "common/swizzled_storage.cuh"
#include "common/tcgen05_layout.h"
#include "common/tensor_memory.cuh"
#include "fc1/config_sm100.cuh"
#include "fc1/epilogue_sm100.cuh"
#include "fc1/params.h"
#include "fc1/token_warps_sm100.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/pdl.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tensor_copy.cuh"

namespace cake::fc1 {

// One thread. Weights and their scales of every stage.
template <int kN>
__device__ __forceinline__ void load_weights(const Params& params, const CUtensorMap& w13_map,
                                             Sm100Storage<kN>& shared, const DealtItems& items) {
  using Config = Sm100<kN>;
  // With more tiles than experts, weights are read again soon.
  const uint64_t policy = items.num_tiles > Config::kExperts ? ptx::createpolicy_evict_normal()
                                                             : ptx::createpolicy_evict_first();
  RingPosition<Config::kStages> ring;
  for (TileCursor<> cursor(items); cursor.tile().count > 0; cursor.advance()) {
    const int32_t block = cursor.tile().expert * Config::kParts + cursor.part();
    const uint8_t* const scales = params.w13_sf + int64_t{block} * Config::kItemScaleBytes;
#pragma unroll 1
    for (int32_t k = 0; k < Config::kUnits; ++k) {
      typename Sm100Storage<kN>::Stage& stage = shared.stages[ring.stage];
      const uint32_t full = ptx::shared_address(&shared.full[ring.stage]);
      if (!model::planted(PlantedBug::kStageReuse)) {
        ptx::mbarrier_wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
      }
      ptx::mbarrier_arrive_expect_tx(full, sizeof(stage.weights) + sizeof(stage.weight_scales));
      ptx::cp_async_bulk_tensor_2d(ptx::shared_address(stage.weights), w13_map,
                                   k * tcgen05::kLineBytes, block * Config::kRows, full, policy);
      ptx::cp_async_bulk(ptx::shared_address(stage.weight_scales),
                         scales + k * Config::kUnitScaleBytes, Config::kUnitScaleBytes, full,
                         policy);
      ring.advance();
    }
  }
  for (int s = 0; s < Config::kStages; ++s) {  // no commit arrives after the CTA's end
    ptx::mbarrier_wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
    ring.advance();
  }
}

// One thread. All matrix instructions.
template <int kN>
__device__ __forceinline__ void multiply(Sm100Storage<kN>& shared, const DealtItems& items,
                                         uint32_t tensor_memory) {
  using Config = Sm100<kN>;
  // Descriptors of the first stage.
  const auto& stage = shared.stages[0];
  const uint64_t first_weights = tcgen05::operand_descriptor(ptx::shared_address(stage.weights));
  const uint64_t first_tokens = tcgen05::operand_descriptor(ptx::shared_address(stage.tokens));
  const uint64_t first_weight_blocks =
      tcgen05::scale_descriptor(ptx::shared_address(stage.weight_scales));
  const uint64_t first_token_blocks =
      tcgen05::scale_descriptor(ptx::shared_address(stage.token_scales));
  RingPosition<Config::kStages> ring;
  RingPosition<2> sums;
  for (TileCursor<> cursor(items); cursor.tile().count > 0; cursor.advance()) {
    const int32_t columns = mma_columns(cursor.tile());
    const uint32_t instruction =
        tcgen05::instruction_descriptor(columns - (model::planted(PlantedBug::kWrongN) ? 8 : 0));
    const uint32_t sum_columns = tensor_memory + sums.stage * Config::kSumColumns;
    if (!model::planted(PlantedBug::kAccumulatorReuse)) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.sums_empty[sums.stage]), sums.parity ^ 1);
    }
#pragma unroll 1
    for (int32_t k = 0; k < Config::kUnits; ++k) {
      if (!model::planted(PlantedBug::kMissingFullWait)) {
        ptx::mbarrier_wait(ptx::shared_address(&shared.full[ring.stage]), ring.parity);
      }
      if (!model::planted(PlantedBug::kMissingFenceAfter)) {
        ptx::tcgen05_fence_after_thread_sync();
      }
      const int32_t scale_stage = model::planted(PlantedBug::kScaleReuse) ? 0 : ring.stage;
      const uint32_t weight_scales =
          tensor_memory + Config::kFirstScaleColumn + scale_stage * Config::kStageColumns;
      const uint32_t token_scales = weight_scales + Config::kWeightScaleColumns;
      const uint32_t offset = ring.stage * static_cast<uint32_t>(sizeof(stage));
      const uint64_t weight_blocks = tcgen05::advance(first_weight_blocks, offset);
      const uint64_t token_blocks = tcgen05::advance(first_token_blocks, offset);
#pragma unroll
      for (int i = 0; i < Config::kSteps; ++i) {
        ptx::tcgen05_cp_32x128b_warpx4(weight_scales + 4 * i,
                                       tcgen05::advance(weight_blocks, i * tcgen05::kScaleBlock));
        ptx::tcgen05_cp_32x128b_warpx4(token_scales + 4 * i,
                                       tcgen05::advance(token_blocks, i * tcgen05::kScaleBlock));
      }
      const uint64_t weights = tcgen05::advance(first_weights, offset);
      uint64_t tokens = tcgen05::advance(first_tokens, offset);
      if (model::planted(PlantedBug::kWrongSwizzle)) {
        tokens &= ~(uint64_t{7} << 61);
      }
#pragma unroll
      for (int i = 0; i < Config::kSteps; ++i) {
        const int scale_step = model::planted(PlantedBug::kWrongScaleColumn) ? 4 * i + 4 : 4 * i;
        ptx::tcgen05_mma_mxf4nvf4_block16(
            sum_columns, tcgen05::advance(weights, i * Config::kStepBytes),
            tcgen05::advance(tokens, i * Config::kStepBytes), instruction,
            weight_scales + scale_step, token_scales + 4 * i, k > 0 || i > 0);
      }
      ptx::tcgen05_commit(ptx::shared_address(&shared.empty[ring.stage]));
      ring.advance();
    }
    ptx::tcgen05_commit(ptx::shared_address(&shared.sums_full[sums.stage]));
    sums.advance();
  }
}

template <int kN>
__device__ __forceinline__ void epilogue_warp(const Params& params, Sm100Storage<kN>& shared,
                                              const DealtItems& items, uint32_t tensor_memory,
                                              int32_t warp, int32_t lane) {
  using Config = Sm100<kN>;
  const uint32_t rows = tensor_memory + tcgen05::tensor_address(32 * warp, 0);
  RingPosition<2> sums;
  for (TileCursor<> cursor(items); cursor.tile().count > 0; cursor.advance()) {
    const Sm100Item item(params, cursor.tile(), cursor.part() * Config::kEpilogueWarps + warp);
    const uint32_t sum_columns = rows + sums.stage * Config::kSumColumns;
    if (!model::planted(PlantedBug::kMissingCommitWait)) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.sums_full[sums.stage]), sums.parity);
    }
    if (!model::planted(PlantedBug::kMissingFenceAfter)) {
      ptx::tcgen05_fence_after_thread_sync();
    }
    int32_t first = 0;
    if constexpr (kN > 8) {  // two blocks at a time hide each other's latencies
      for (; first + 8 < item.count; first += 16) {
        store_features<2>(item, sum_columns, first, lane);
      }
    }
    if (first < item.count) {
      store_features<1>(item, sum_columns, first, lane);
    }
    if (!model::planted(PlantedBug::kMissingFenceBefore)) {
      ptx::tcgen05_fence_before_thread_sync();
    }
    release(shared.sums_empty[sums.stage], lane);
    sums.advance();
  }
}

template <int kN>
__global__ void __launch_bounds__(Sm100<kN>::kThreads + model::kEngineThreads, 1)
    cake_fc1_sm100(const __grid_constant__ Params params,
                   const __grid_constant__ CUtensorMap w13_map,
                   const __grid_constant__ CUtensorMap input_map) {
#if !CAKE_HAS_TCGEN05
  __trap();  // the plan never picks this kernel elsewhere
#else
  using Config = Sm100<kN>;
  static_assert(sizeof(Sm100Storage<kN>) <= model::kMaxSharedBytes,
                "shared memory exceeds what a CTA may have");
  extern __shared__ __align__(1024) uint8_t fc1_sm100_storage[];
  const model::Engine engine(Config::kThreads);
  if (engine.ran()) {
    return;
  }
  auto& shared = swizzled_storage<Sm100Storage<kN>>(fc1_sm100_storage);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  if (warp == Config::kMmaWarp) {
    allocate_tensor_memory(shared.tensor_memory);
  }
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(w13_map);
    ptx::prefetch_tensormap(input_map);
    for (int s = 0; s < Config::kStages; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[s]),
                         2 + kWarpArrivals);  // weights, token rows; scales
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[s]), 1);
    }
    for (int b = 0; b < 2; ++b) {
      ptx::mbarrier_init(ptx::shared_address(&shared.sums_full[b]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.sums_empty[b]),
                         Config::kEpilogueWarps * kWarpArrivals);
    }
    ptx::fence_mbarrier_init();
  }
  sync_tensor_memory(Config::kThreads);
  const uint32_t tensor_memory = shared.tensor_memory;
  if (!model::planted(PlantedBug::kEarlyDependentRead)) {
    ptx::griddepcontrol_wait();
  }
  ptx::griddepcontrol_launch_dependents();
  const DealtItems items{params.tiles, load_num_tiles(params.num_tiles), Config::kParts};
  if (warp < Config::kEpilogueWarps) {
    epilogue_warp<kN>(params, shared, items, tensor_memory, warp, lane);
  } else if (warp >= Config::kFirstTokenWarp) {
    load_tokens<kN>(params, input_map, shared, items, warp - Config::kFirstTokenWarp, lane);
  } else if (ptx::elect_sync()) {
    if (warp == Config::kWeightWarp) {
      load_weights<kN>(params, w13_map, shared, items);
    } else {
      multiply<kN>(shared, items, tensor_memory);
    }
  }
  sync_tensor_memory(Config::kThreads);
  if (warp == Config::kMmaWarp && !model::planted(PlantedBug::kMissingDealloc)) {
    ptx::tcgen05_dealloc<tcgen05::kColumns>(tensor_memory);
  }
#endif
}

}  // namespace cake::fc1
