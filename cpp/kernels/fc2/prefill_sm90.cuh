// FC2 for many pairs per expert, sm_90a, on common/grouped_mma_sm90.cuh. One BF16 row per pair.
//
// An item is a run of blocks of 128 output columns of one tile. A CTA has a range of equal size of
// all blocks, then what it claims (common/work_pool.cuh), or tiles in turn (PrefillCursor). One CTA
// per SM, 20 warps:
//
//   16 MMA warps     two pairs of warpgroups take the item's blocks in turn, each warpgroup half of
//                    the rows: multiply, store the outputs
//   3 unpack warps   once per item: the pairs' intermediate, all 384 columns in three units, stored
//                    as half; it stays while the item's blocks pass. The packed intermediate of
//                    the next item is fetched meanwhile, and one of its units unpacked
//   load thread      takes the items; codes and scales of a block per stage: two contiguous bulk
//                    copies
//
//   full / empty[s]           load thread <-> one pair of warpgroups (1 arrival + bytes / 8)
//   pairs_full / _empty[u]    unpack warps <-> MMA warps              (3 / 16 arrivals)
//   work_full / _empty[w]     load thread <-> unpack warps: an item   (1 / 3 arrivals)
//
// The number of stages is even: a stage always belongs to one pair of warpgroups, which therefore
// sees every phase of its barriers. All others see every phase of what they wait for: each unpack
// warp takes every item, each MMA warp waits for and gives back every unit, also of an item that
// has no block for it.
//
// The unpack warps take item i + 1 while they describe item i, so it is published before the blocks
// of item i are copied. While the load thread waits for a stage in item i, the items up to i + 1
// are published and all blocks before are copied or on their way, which is all that the others need
// to get to that stage. While it waits for the place of item i + 1 (item i - 3 has it), they have
// what they need to describe item i - 1, long after they have taken item i - 3.
//
// Weights, tile list and counter do not depend on FC1 (which released this grid only after routing
// had finished), so the weights start before the wait.
#pragma once

#include <cstdint>

#include "common/bf16_pair.cuh"
#include "common/grouped_mma_sm90.cuh"
#include "common/pipeline.cuh"
#include "common/swizzled_storage.cuh"
#include "fc2/params.h"
#include "fc2/prefill_config_sm90.cuh"
#include "fc2/prefill_producers_sm90.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/pdl.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/special_register.cuh"
#include "ptx/store.cuh"

namespace cake::fc2 {

// What an MMA warp keeps through the kernel: little, since its registers are all in use.
struct MmaWarp {
  int32_t use;  // of a stage, that comes next; every second one is of these warpgroups
  __device__ __forceinline__ Slot<Prefill::kStages> stage() const {
    return Slot<Prefill::kStages>(static_cast<uint32_t>(use));
  }
  // Read anew whenever they are needed.
  __device__ __forceinline__ int32_t warp() const {
    return static_cast<int32_t>(ptx::tid_x() / 32);
  }
  __device__ __forceinline__ int32_t lane() const {
    return static_cast<int32_t>(ptx::tid_x() % 32);
  }
  // Its 32 rows of a block, which it shares with a neighbour.
  __device__ __forceinline__ int32_t rows_of_two() const {
    return static_cast<int32_t>(ptx::tid_x() / 64 % 4);
  }
};

// Sums of 64 rows of a block.
template <int N>
__device__ __forceinline__ void multiply_block(PrefillStorage& shared, const MmaWarp& self,
                                               const PrefillItem& item,
                                               float (&sums)[Prefill::kTilePairs / 2]) {
  using namespace grouped_mma;
  const int32_t row = LaneRow<>(self.warp(), self.lane()).row();
  const int32_t t = self.lane() % 4;
  const Slot<Prefill::kStages> stage_slot = self.stage();
  const PrefillStorage::Stage& stage = shared.stages[stage_slot.stage];
  const uint8_t* codes = stage.codes[self.rows_of_two() * 32 + row] + t * 16;
  const uint8_t* scales =
      stage.scales + t / 2 * kScaleBlockBytes + row * 16 + self.rows_of_two() * 4 + t % 2 * 2;
  RawUnit raw;
  const auto load = [&](int k) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      raw.codes[r] = *reinterpret_cast<const uint4*>(codes + r * 8 * Prefill::kRowBytes +
                                                     k * (kUnitColumns / 2));
      raw.scales[r] =
          *reinterpret_cast<const uint16_t*>(scales + r * 128 + k * 2 * kScaleBlockBytes);
    }
    if (k + 1 == Prefill::kUnits) {
      release_loaded(shared.empty[stage_slot.stage], self.lane(), raw.codes[0].x, raw.codes[1].x,
                     raw.scales[0], raw.scales[1]);
    }
  };
  const bool first_of_item = self.use - 2 < item.first_use;
  const bool last_of_item = self.use + 2 >= item.end_use;
  // The compiler does not know that this is the same in all lanes; uniform registers have room.
  const uint32_t unit_use = __shfl_sync(0xFFFFFFFFu, item.unit_use, 0);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    sums[i] = ptx::undefined_float();
  }
  ptx::mbarrier_wait(ptx::shared_address(&shared.full[stage_slot.stage]), stage_slot.parity);
  load(0);
  const auto multiply = [&]<int k>() {
    const Slot<Prefill::kSlots> pairs(unit_use + k);
    if (first_of_item) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.pairs_full[pairs.stage]), pairs.parity);
    }
    Fragments fragments;
    multiply_unit<N, k == 0>(raw, ptx::shared_address(&shared.pairs[pairs.stage]), fragments, sums);
    if (k + 1 < Prefill::kUnits) {
      load(k + 1);
    }
    ptx::wgmma_wait_all<N>(sums);
    if (last_of_item) {
      release(shared.pairs_empty[pairs.stage], self.lane());
    }
  };
  multiply.template operator()<0>();
  multiply.template operator()<1>();
  multiply.template operator()<2>();
  static_assert(Prefill::kUnits == 3);
}

// Stores 64 output columns of the tile's pairs: each lane two consecutive ones, a warp 16.
template <int N>
__device__ __forceinline__ void store_outputs(const Params& params, const PrefillItem& item,
                                              const MmaWarp& self,
                                              const float (&sums)[Prefill::kTilePairs / 2]) {
  const int32_t t = self.lane() % 4;
  const uint32_t row_bytes = params.num_blocks * (Prefill::kBlockRows * 2);
  const int32_t column = (item.block + self.use - item.first_use) * Prefill::kBlockRows +
                         self.rows_of_two() * 32 +
                         2 * grouped_mma::LaneRow<>(self.warp(), self.lane()).feature();
  uint16_t* const outputs = params.rows + column;
  const float alpha = item.alpha;
  const auto* pair_ids = reinterpret_cast<const int2*>(item.pair_ids + 2 * t);
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const int2 ids = pair_ids[4 * j];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int32_t pair = c == 0 ? ids.x : ids.y;
      ptx::st_global_if(pair >= 0,
                        reinterpret_cast<uint8_t*>(outputs) +
                            static_cast<uint64_t>(static_cast<uint32_t>(pair)) * row_bytes,
                        bf16_pair(sums[4 * j + c] * alpha, sums[4 * j + 2 + c] * alpha));
    }
  }
}

__device__ __forceinline__ void mma_warp(const Params& params, PrefillStorage& shared,
                                         int32_t warp) {
  using namespace grouped_mma;
  MmaWarp self{warp / 8};
  const PrefillItem* description = shared.items;
  for (uint32_t unit_use = 0;;) {
    const Slot<Prefill::kSlots> pairs(unit_use);
    ptx::mbarrier_wait(ptx::shared_address(&shared.pairs_full[pairs.stage]), pairs.parity);
    const PrefillItem& item = *description;
    if (item.count == 0) {
      break;
    }
    if (self.use >= item.end_use) {  // these warpgroups have no block of the item
      for (uint32_t k = 0; k < Prefill::kUnits; ++k) {
        const Slot<Prefill::kSlots> unit(unit_use + k);
        ptx::mbarrier_wait(ptx::shared_address(&shared.pairs_full[unit.stage]), unit.parity);
        release(shared.pairs_empty[unit.stage], self.lane());
      }
    }
    for (; self.use < item.end_use; self.use += 2) {
      with_columns<Prefill>(item.count, [&]<int N>() {
        float sums[Prefill::kTilePairs / 2];
        multiply_block<N>(shared, self, item, sums);
        store_outputs<N>(params, item, self, sums);
      });
    }
    unit_use = item.unit_use + Prefill::kUnits;
    description = description == &shared.items[2] ? shared.items : description + 1;
  }
}

__global__ void __launch_bounds__(Prefill::kThreads, 1)
    cake_fc2_prefill_sm90(const __grid_constant__ Params params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  __trap();  // the plan never picks this kernel elsewhere
#else
  using namespace grouped_mma;
  extern __shared__ __align__(1024) uint8_t fc2_prefill_storage[];
  PrefillStorage& shared = swizzled_storage<PrefillStorage>(fc2_prefill_storage);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Prefill::kStages; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[s]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[s]),
                         Prefill::kMmaWarps / 2 * kWarpArrivals);
    }
    for (int w = 0; w < Prefill::kWorks; ++w) {
      ptx::mbarrier_init(ptx::shared_address(&shared.work_full[w]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.work_empty[w]),
                         Prefill::kUnpackWarps * kWarpArrivals);
    }
    for (int u = 0; u < Prefill::kSlots; ++u) {
      ptx::mbarrier_init(ptx::shared_address(&shared.pairs_full[u]),
                         Prefill::kUnpackWarps * kWarpArrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.pairs_empty[u]),
                         Prefill::kMmaWarps * kWarpArrivals);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  if (warp < Prefill::kMmaWarps) {
    ptx::setmaxnreg_inc<Prefill::kMmaRegisters>();
    ptx::griddepcontrol_wait();
    mma_warp(params, shared, warp);
    return;
  }
  ptx::setmaxnreg_dec<Prefill::kLoadRegisters>();
  if (warp < Prefill::kMmaWarps + Prefill::kUnpackWarps) {
    ptx::griddepcontrol_wait();
    unpack_warps(params, shared, static_cast<int32_t>(threadIdx.x) - Prefill::kMmaWarps * 32);
  } else if (ptx::elect_sync()) {
    load_thread(params, shared);
  }
#endif
}

}  // namespace cake::fc2
