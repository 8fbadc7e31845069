// The MMA warps of FC2 for many pairs per expert, sm_90a (fc2/prefill_sm90.cuh): multiply and
// store.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/grouped_mma_sm90.cuh"
#include "common/pipeline.cuh"
#include "fc2/params.h"
#include "fc2/prefill_storage_sm90.cuh"
#include "ptx/arithmetic.cuh"
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
                                               float (&sums)[grouped_mma::kTilePairs / 2]) {
  using namespace grouped_mma;
  const int32_t row = LaneRow(self.warp(), self.lane()).row();
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
                                              const float (&sums)[grouped_mma::kTilePairs / 2]) {
  const int32_t t = self.lane() % 4;
  const uint32_t row_bytes = params.num_blocks * (Prefill::kBlockRows * 2);
  const int32_t column = (item.block + self.use - item.first_use) * Prefill::kBlockRows +
                         self.rows_of_two() * 32 +
                         2 * grouped_mma::LaneRow(self.warp(), self.lane()).feature();
  uint16_t* const outputs = params.rows + column;
  const float alpha = item.alpha;
  const auto* pair_ids = reinterpret_cast<const int2*>(item.pair_ids + 2 * t);
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const int2 ids = pair_ids[4 * j];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int32_t pair = c == 0 ? ids.x : ids.y;
      const __nv_bfloat162 two =
          __floats2bfloat162_rn(sums[4 * j + c] * alpha, sums[4 * j + 2 + c] * alpha);
      ptx::st_global_if(pair >= 0,
                        reinterpret_cast<uint8_t*>(outputs) +
                            static_cast<uint64_t>(static_cast<uint32_t>(pair)) * row_bytes,
                        *reinterpret_cast<const uint32_t*>(&two));
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
      with_columns(item.count, [&]<int N>() {
        float sums[kTilePairs / 2];
        multiply_block<N>(shared, self, item, sums);
        store_outputs<N>(params, item, self, sums);
      });
    }
    unit_use = item.unit_use + Prefill::kUnits;
    description = description == &shared.items[2] ? shared.items : description + 1;
  }
}

}  // namespace cake::fc2
