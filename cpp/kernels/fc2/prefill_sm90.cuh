// FC2 for many pairs per expert, sm_90a, on common/grouped_mma_sm90.cuh. One BF16 row per pair.
//
// Item = (tile, a few blocks of 128 output columns); CTA c takes items c, c + grid, ... One CTA per
// SM, 20 warps:
//
//   16 MMA warps     two pairs of warpgroups take the item's blocks in turn, each warpgroup half of
//                    the rows: multiply, store the outputs
//   3 unpack warps   once per item: the pairs' intermediate, all 384 columns in three units, stored
//                    as half; it stays while the item's blocks pass. The packed intermediate of
//                    the next item is fetched meanwhile, and one of its units unpacked
//   1 load warp      codes and scales of a block per stage: two contiguous bulk copies
//
//   full / empty[s]           load warp <-> one pair of warpgroups   (1 arrival + bytes / 8)
//   pairs_full / _empty[u]    unpack warps <-> MMA warps              (3 / 16 arrivals)
//
// The number of stages is even: a stage always belongs to one pair of warpgroups, which therefore
// sees every phase of its barriers. Weights and tile list do not depend on FC1 (which released this
// grid only after routing had finished), so the weights start before the wait.
#pragma once

#include <cstdint>

#include "common/grouped_mma_sm90.cuh"
#include "common/items.cuh"
#include "common/pipeline.cuh"
#include "common/swizzled_storage.cuh"
#include "fc2/params.h"
#include "fc2/prefill_mma_sm90.cuh"
#include "fc2/prefill_storage_sm90.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"
#include "ptx/setmaxnreg.cuh"

namespace cake::fc2 {

// The blocks of an item: [begin, end) of the launch's.
struct BlockRange {
  int32_t begin, end;

  __device__ __forceinline__ BlockRange(int32_t num_blocks, int32_t parts, int32_t part)
      : begin(part * num_blocks / parts), end((part + 1) * num_blocks / parts) {}
};

__device__ __forceinline__ void load_warp(const Params& params, PrefillStorage& shared,
                                          const DealtItems& items) {
  const uint64_t policy = ptx::createpolicy_evict_first();
  RingPosition<Prefill::kStages> ring;
  for (TileCursor cursor(items); cursor.tile().count > 0; cursor.advance()) {
    const BlockRange blocks(params.num_blocks, items.per_tile, cursor.part());
    const int64_t first =
        int64_t{cursor.tile().expert} * Prefill::kExpertBlocks + params.first_block;
    for (int32_t block = blocks.begin; block < blocks.end; ++block) {
      PrefillStorage::Stage& stage = shared.stages[ring.stage];
      const uint32_t full = ptx::shared_address(&shared.full[ring.stage]);
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, Prefill::kWeightBytes + Prefill::kScaleBytes);
      ptx::cp_async_bulk(ptx::shared_address(stage.codes),
                         params.w2 + (first + block) * Prefill::kWeightBytes, Prefill::kWeightBytes,
                         full, policy);
      ptx::cp_async_bulk(ptx::shared_address(stage.scales),
                         params.w2_sf + (first + block) * Prefill::kScaleBytes,
                         Prefill::kScaleBytes, full, policy);
      ring.advance();
    }
  }
}

// Dequantizes words v, v + 4, v + 8, v + 12 of unit k of a pair into four chunks of row n.
__device__ __forceinline__ void unpack_words(const PackedPair& packed, int32_t k, int32_t v,
                                             grouped_mma::PairUnit& unit, int32_t n) {
  const auto* codes = reinterpret_cast<const uint32_t*>(packed.codes + k * 64) + v;
  const uint2 eight = reinterpret_cast<const uint2*>(packed.scales)[k];
  // The scales of v's half of columns 32t .. 32t + 31, t = 0 .. 3: every other byte.
  const uint32_t scales = __byte_perm(eight.x, eight.y, v < 2 ? 0x6420u : 0x7531u);
  const ScalePair pairs[2] = {scale_pair(scales), scale_pair(scales >> 16)};
  uint32_t halves[4][4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    dequantize8(codes[4 * t], t % 2 == 0 ? pairs[t / 2].first : pairs[t / 2].second, halves[t]);
  }
  uint8_t* const row = unit.blocks[v / 2] + n * 128;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<uint4*>(row + ((v % 2 * 4 + i) ^ (n % 8)) * 16) =
        make_uint4(halves[0][i], halves[1][i], halves[2][i], halves[3][i]);
  }
}

// Four threads of a warp share a pair: thread `thread` fetches and unpacks a quarter of pairs
// thread / 4 + 24 i. The item's description goes with its first unit.
__device__ __forceinline__ void unpack_warps(const Params& params, PrefillStorage& shared,
                                             const DealtItems& items, int32_t thread) {
  using namespace grouped_mma;
  constexpr int kStep = Prefill::kUnpackWarps * 32 / 4;
  constexpr int kPasses = (kTilePairs + kStep - 1) / kStep;
  const int32_t v = thread % 4;
  const int32_t first = thread / 4;
  int32_t pairs[kPasses];  // of the item to be fetched, -1 beyond its last
  const auto look_up = [&](const Tile& tile) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int32_t n = first + kStep * i;
      pairs[i] = n < tile.count ? params.expert_pairs[tile.first + n] : -1;
    }
  };
  const auto fetch = [&]() {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      if (pairs[i] >= 0) {
        PackedPair& packed = shared.packed[first + kStep * i];
        const uint8_t* const codes = params.input + pairs[i] * Prefill::kRowBytes + v * 16;
#pragma unroll
        for (int k = 0; k < Prefill::kUnits; ++k) {
          ptx::cp_async_16(ptx::shared_address(packed.codes) + v * 16 + k * 64, codes + k * 64);
        }
        if (v < Prefill::kUnits) {
          ptx::cp_async_8(ptx::shared_address(packed.scales) + v * 8,
                          params.input_sf + pairs[i] * (Prefill::kIntermediate / 16) + v * 8);
        }
      }
    }
  };
  RingPosition<Prefill::kSlots> ring;
  int32_t uses = 0;
  TileCursor cursor(items);
  look_up(cursor.tile());
  fetch();
  for (;; cursor.advance()) {
    const Tile& tile = cursor.tile();
    PrefillItem& item = shared.items[cursor.index() % 3];
#pragma unroll 1
    for (int32_t k = 0; k < Prefill::kUnits; ++k) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.pairs_empty[ring.stage]), ring.parity ^ 1);
      if (k == 0) {
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          const int32_t n = first + kStep * i;
          if (v == 0 && n < kTilePairs) {
            item.pair_ids[n] = pairs[i];
          }
        }
        if (thread == 0) {
          const BlockRange blocks(params.num_blocks, items.per_tile, cursor.part());
          item.count = tile.count;
          item.unit_use = cursor.index() * Prefill::kUnits;
          item.block = blocks.begin;
          item.first_use = uses;
          uses += blocks.end - blocks.begin;
          item.end_use = uses;
          item.alpha = tile.count > 0 ? params.fc2_alpha[tile.expert] * kDequantizedSquare : 0.0f;
        }
        look_up(cursor.next());
        ptx::cp_async_wait_all();
        __syncwarp();
      }
#pragma unroll 1
      for (int32_t n = first; n < tile.count; n += kStep) {
        unpack_words(shared.packed[n], k, v, shared.pairs[ring.stage], n);
      }
      ptx::fence_proxy_async();
      release(shared.pairs_full[ring.stage], thread % 32);
      ring.advance();
      if (tile.count == 0) {  // the description says so
        return;
      }
    }
    fetch();
  }
}

__global__ void __launch_bounds__(grouped_mma::kThreads, 1)
    cake_fc2_prefill_sm90(const __grid_constant__ Params params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  __trap();  // the plan never picks this kernel elsewhere
#else
  using namespace grouped_mma;
  extern __shared__ __align__(1024) uint8_t fc2_prefill_storage[];
  PrefillStorage& shared = swizzled_storage<PrefillStorage>(fc2_prefill_storage);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Prefill::kStages; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[s]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[s]), kMmaWarps / 2);
    }
    for (int u = 0; u < Prefill::kSlots; ++u) {
      ptx::mbarrier_init(ptx::shared_address(&shared.pairs_full[u]), Prefill::kUnpackWarps);
      ptx::mbarrier_init(ptx::shared_address(&shared.pairs_empty[u]), kMmaWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  // An item is a group of blocks of a tile.
  const int32_t parts = (params.num_blocks + Prefill::kItemBlocks - 1) / Prefill::kItemBlocks;
  if (warp < kMmaWarps) {
    ptx::setmaxnreg_inc<kMmaRegisters>();
    ptx::griddepcontrol_wait();
    mma_warp(params, shared, warp);
    return;
  }
  ptx::setmaxnreg_dec<kOtherRegisters>();
  const DealtItems items{params.tiles, load_num_tiles(params.num_tiles), parts};
  if (warp < kMmaWarps + Prefill::kUnpackWarps) {
    ptx::griddepcontrol_wait();
    unpack_warps(params, shared, items, static_cast<int32_t>(threadIdx.x) - kMmaWarps * 32);
  } else if (lane == 0) {
    load_warp(params, shared, items);
  }
#endif
}

}  // namespace cake::fc2
