// From FC2's sums in tensor memory to BF16 rows, sm_100a and sm_103a.
//
// A warp has 32 prepared rows of the block. Two loads 16x256b give lane 4g + t the rows g, g + 8,
// g + 16 and g + 24, which are outputs 4g .. 4g + 3, of pairs 8j + 2t and the next: one store of 8
// bytes each. A store instruction of the warp writes 64 contiguous bytes of each of four rows,
// whole sectors, so that nothing is gained by way of shared memory.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/model.cuh"
#include "common/pipeline.cuh"
#include "common/tcgen05_layout.h"
#include "fc2/config_sm100.cuh"
#include "fc2/params.h"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"

namespace cake::fc2 {

// The sums of a group of pairs.
template <int kN>
struct Sums {
  static constexpr int kWords = Sm100<kN>::kGroupPairs / 2;
  uint32_t low[kWords];   // rows g, g + 8
  uint32_t high[kWords];  // rows g + 16, g + 24

  __device__ __forceinline__ void load(uint32_t address) {
    ptx::tcgen05_ld_16x256b(low, address);
    ptx::tcgen05_ld_16x256b(high, address + tcgen05::tensor_address(16, 0));
  }
  __device__ __forceinline__ void wait() {
    if (!model::planted(PlantedBug::kMissingLoadWait)) {
      ptx::tcgen05_wait_ld(low, high);
    }
  }
  // Four consecutive outputs of pair 8j + 2t + c.
  __device__ __forceinline__ uint2 outputs(int j, int c, float alpha) const {
    const auto two = [&](const uint32_t (&words)[kWords]) {
      const __nv_bfloat162 values = __floats2bfloat162_rn(
          __uint_as_float(words[4 * j + c]) * alpha, __uint_as_float(words[4 * j + 2 + c]) * alpha);
      return *reinterpret_cast<const uint32_t*>(&values);
    };
    return make_uint2(two(low), two(high));
  }
};

// What a lane needs of an item. Its pair 2j + c is 8j + 2t + c of the tile.
template <int kN>
struct LanePairs {
  uint32_t row_offsets[kN / 4];  // bytes
  int32_t count;                 // pair 2j + c exists if 8j + c < count
  int32_t columns;
  float alpha;

  __device__ __forceinline__ LanePairs(const typename Sm100<kN>::Item& item, int32_t t)
      : count(item.count - 2 * t - (model::planted(PlantedBug::kTail) ? 1 : 0)),
        columns(mma_columns<kN>(item.count)),
        alpha(item.alpha) {
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const uint2 two = *reinterpret_cast<const uint2*>(item.row_offsets + 8 * j + 2 * t);
      row_offsets[2 * j] = two.x;
      row_offsets[2 * j + 1] = two.y;
    }
  }
  // Depends on all that was read of the item.
  __device__ __forceinline__ uint32_t read() const {
    uint32_t all = columns | __float_as_uint(alpha);
#pragma unroll
    for (const uint32_t offset : row_offsets) {
      all |= offset;
    }
    return all;
  }
};

// `address`: the warp's rows of an accumulator; gives it back once it is read. `outputs`: the
// lane's four of the block, in a row at offset 0.
template <int kN>
__device__ __forceinline__ void store_block(const LanePairs<kN>& pairs, uint32_t address,
                                            uint64_t& sums_empty, uint8_t* outputs, int32_t lane) {
  constexpr int kGroup = Sm100<kN>::kGroupPairs;
  Sums<kN> loaded[2];  // one is stored while the other is on its way
  loaded[0].load(address);
#pragma unroll
  for (int first = 0; first < kN; first += kGroup) {
    Sums<kN>& sums = loaded[first / kGroup % 2];
    if (first < pairs.columns) {
      sums.wait();
      if (first + kGroup < kN && first + kGroup < pairs.columns) {
        loaded[(first / kGroup + 1) % 2].load(address + first + kGroup);
      } else {
        if (!model::planted(PlantedBug::kMissingFenceBefore)) {
          ptx::tcgen05_fence_before_thread_sync();
        }
        release(sums_empty, lane);
      }
#pragma unroll
      for (int n = 0; n < kGroup / 4; ++n) {
        const int j = n / 2;
        const int c = n % 2;
        const uint2 four = sums.outputs(j, c, pairs.alpha);  // in any case: no branch then
        if (first + 8 * j + c < pairs.count) {
          *reinterpret_cast<uint2*>(outputs + pairs.row_offsets[first / 4 + n]) = four;
        }
      }
    }
  }
}

// Warp 0 .. 3.
template <int kN>
__device__ __forceinline__ void epilogue_warp(const Params& params, Sm100Storage<kN>& shared,
                                              uint32_t tensor_memory, int32_t warp, int32_t lane) {
  using Config = Sm100<kN>;
  const uint32_t rows = tensor_memory + tcgen05::tensor_address(32 * warp, 0);
  uint8_t* const outputs =
      reinterpret_cast<uint8_t*>(params.rows) + (32 * warp + lane / 4 * 4) * sizeof(uint16_t);
  RingPosition<Config::kSums> ring;
#pragma unroll 1
  for (RingPosition<Config::kItems> i;; i.advance()) {
    const typename Config::Item& item = shared.items[i.stage];
    ptx::mbarrier_wait(ptx::shared_address(&shared.item_ready[i.stage]), i.parity);
    if (item.count == 0) {
      break;
    }
    const LanePairs<kN> pairs(item, lane % 4);
    const int32_t end = item.end;
#pragma unroll 1
    for (int32_t block = item.begin; block < end; ++block) {
      if (!model::planted(PlantedBug::kMissingCommitWait)) {
        ptx::mbarrier_wait(ptx::shared_address(&shared.sums_full[ring.stage]), ring.parity);
      }
      ptx::tcgen05_fence_after_thread_sync();
      store_block(pairs, rows + ring.stage * Config::kSumColumns, shared.sums_empty[ring.stage],
                  outputs + int64_t{block} * (Config::kBlockRows * sizeof(uint16_t)), lane);
      ring.advance();
    }
    release_loaded(shared.item_empty[i.stage], lane, pairs.read(), static_cast<uint32_t>(end));
  }
}

}  // namespace cake::fc2
