// FC2 for many pairs per expert, sm_90a, on common/grouped_mma_sm90.cuh. One BF16 row per pair.
//
// Item = (tile, a few blocks of 128 output columns); CTA c takes items c, c + grid, ... One CTA per
// SM, 20 warps:
//
//   16 MMA warps     two pairs of warpgroups take the item's blocks in turn, each warpgroup half of
//                    the rows: multiply, store the outputs
//   3 unpack warps   once per item: the pairs' intermediate, all 384 columns in three units, stored
//                    as half; it stays while the item's blocks pass
//   1 load warp      codes and scales of a block per stage: two contiguous bulk copies
//
//   full / empty[s]           load warp <-> one pair of warpgroups   (1 arrival + bytes / 8)
//   pairs_full / _empty[k]    unpack warps <-> MMA warps              (3 / 16 arrivals)
//
// The number of stages is even: a stage always belongs to one pair of warpgroups, which therefore
// sees every phase of its barriers. Weights and tile list do not depend on FC1 (which released this
// grid only after routing had finished), so the weights start before the wait.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/grouped_mma_sm90.cuh"
#include "fc2/params.h"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/pdl.cuh"
#include "ptx/setmaxnreg.cuh"

namespace cake::fc2 {

struct Prefill {
  static constexpr int kHidden = 3584;
  static constexpr int kIntermediate = 384;
  static constexpr int kRowBytes = kIntermediate / 2;
  static constexpr int kBlockRows = 128;
  static constexpr int kExpertBlocks = kHidden / kBlockRows;
  static constexpr int kUnits = kIntermediate / grouped_mma::kUnitColumns;
  static constexpr int kStages = 4;
  static constexpr int kItemBlocks = 14;  // at most so many blocks of an item
  static constexpr int kUnpackWarps = 3;
  static constexpr int kWeightBytes = kBlockRows * kRowBytes;
  static constexpr int kScaleBytes = kBlockRows * kIntermediate / 16;
};
static_assert(Prefill::kStages % 2 == 0, "a stage must belong to one pair of warpgroups");
static_assert(Prefill::kUnpackWarps * 32 >= grouped_mma::kTilePairs, "a thread has one pair");
static_assert(Prefill::kUnpackWarps + 1 == grouped_mma::kOtherWarps);

// What the MMA warps need to know of an item.
struct PrefillItem {
  int32_t count;  // pairs; 0 after the last item
  int32_t part;
  float alpha;  // undoes the dequantization factors as well
  alignas(16) int32_t pair_ids[32 * grouped_mma::kPairRegisters];
};

struct PrefillStorage {
  grouped_mma::PairUnit pairs[Prefill::kUnits];
  struct Stage {
    uint8_t codes[Prefill::kBlockRows][Prefill::kRowBytes];
    uint8_t scales[Prefill::kScaleBytes];  // 512 bytes hold 4 columns of 128 rows
  } stages[Prefill::kStages];
  PrefillItem items[2];  // an item and the one after it
  uint64_t full[Prefill::kStages];
  uint64_t empty[Prefill::kStages];
  uint64_t pairs_full[Prefill::kUnits];
  uint64_t pairs_empty[Prefill::kUnits];
};
static_assert(sizeof(PrefillStorage) <= 232448, "shared memory exceeds 227 KB");

// The blocks of an item: [begin, end) of the launch's.
struct BlockRange {
  int32_t begin, end;

  __device__ __forceinline__ BlockRange(int32_t num_blocks, int32_t parts, int32_t part)
      : begin(part * num_blocks / parts), end((part + 1) * num_blocks / parts) {}
};

__device__ __forceinline__ void load_warp(const Params& params, PrefillStorage& shared,
                                          const grouped_mma::DealtItems& items) {
  const uint64_t policy = ptx::createpolicy_evict_first();
  RingPosition<Prefill::kStages> ring;
  for (grouped_mma::TileCursor cursor(items); cursor.tile().count > 0; cursor.advance()) {
    const BlockRange blocks(params.num_blocks, items.per_tile, cursor.part());
    const int64_t first =
        int64_t{cursor.tile().expert} * Prefill::kExpertBlocks + params.first_block;
    for (int32_t block = blocks.begin; block < blocks.end; ++block) {
      PrefillStorage::Stage& stage = shared.stages[ring.stage];
      const uint32_t full = ptx::shared_address(&shared.full[ring.stage]);
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, Prefill::kWeightBytes + Prefill::kScaleBytes);
      ptx::cp_async_bulk(ptx::shared_address(stage.codes),
                         params.w2 + (first + block) * Prefill::kWeightBytes,
                         Prefill::kWeightBytes, full, policy);
      ptx::cp_async_bulk(ptx::shared_address(stage.scales),
                         params.w2_sf + (first + block) * Prefill::kScaleBytes,
                         Prefill::kScaleBytes, full, policy);
      ring.advance();
    }
  }
}

// Dequantizes a unit of a pair, 64 bytes of codes and eight scales, into row n.
__device__ __forceinline__ void unpack_unit(const uint4 (&codes)[4], uint2 scales,
                                            grouped_mma::PairUnit& unit, int32_t n) {
  const ScalePair pairs[4] = {scale_pair(scales.x), scale_pair(scales.x >> 16),
                              scale_pair(scales.y), scale_pair(scales.y >> 16)};
#pragma unroll
  for (int v = 0; v < 4; ++v) {
    uint32_t halves[4][4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint32_t word = v == 0   ? codes[t].x
                            : v == 1 ? codes[t].y
                            : v == 2 ? codes[t].z
                                     : codes[t].w;
      dequantize8(word, v < 2 ? pairs[t].first : pairs[t].second, halves[t]);
    }
    uint8_t* const row = unit.blocks[v / 2] + n * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<uint4*>(row + (v % 2 * 4 + i ^ n % 8) * 16) =
          make_uint4(halves[0][i], halves[1][i], halves[2][i], halves[3][i]);
    }
  }
}

// Thread n has pair n of every item's tile. The item's description goes with its first unit.
__device__ __forceinline__ void unpack_warps(const Params& params, PrefillStorage& shared,
                                             const grouped_mma::DealtItems& items, int32_t n) {
  using namespace grouped_mma;
  TileCursor cursor(items);
  const auto lookup = [&](const Tile& tile) {
    return n < tile.count ? params.expert_pairs[tile.first + n] : -1;
  };
  int32_t pair = lookup(cursor.tile());
  for (uint32_t parity = 0;; cursor.advance(), parity ^= 1) {
    const Tile& tile = cursor.tile();
    const int32_t next_pair = lookup(cursor.next());
    for (int32_t k = 0; k < Prefill::kUnits; ++k) {
      uint4 codes[4]{};
      uint2 scales{};
      if (pair >= 0) {
        const auto* source = reinterpret_cast<const uint4*>(
            params.input + int64_t{pair} * Prefill::kRowBytes + k * (kUnitColumns / 2));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          codes[i] = source[i];
        }
        scales = reinterpret_cast<const uint2*>(params.input_sf + int64_t{pair} *
                                                (Prefill::kIntermediate / 16))[k];
      }
      ptx::mbarrier_wait(ptx::shared_address(&shared.pairs_empty[k]), parity ^ 1);
      if (k == 0) {  // the MMA warps are past the item before the last
        PrefillItem& item = shared.items[parity];
        item.pair_ids[n] = pair;
        if (n == 0) {
          item.count = tile.count;
          item.part = cursor.part();
          item.alpha = tile.count > 0 ? params.fc2_alpha[tile.expert] * kDequantizedSquare : 0.0f;
        }
      }
      if (pair >= 0) {
        unpack_unit(codes, scales, shared.pairs[k], n);
      }
      ptx::fence_proxy_async();
      release(shared.pairs_full[k], n % 32);
      if (tile.count == 0) {  // the description says so
        return;
      }
    }
    pair = next_pair;
  }
}

// What an MMA warp keeps through the kernel.
struct MmaWarp {
  int32_t warp;
  int32_t lane;
  RingPosition<Prefill::kStages> ring;  // of the block that comes next, whoever takes it
};

// Sums of 64 rows of a block. `first` and `last`: of this warpgroup's blocks of the item.
template <int N>
__device__ __forceinline__ void multiply_block(PrefillStorage& shared, const MmaWarp& self,
                                               uint32_t item_parity, bool first, bool last,
                                               float (&sums)[grouped_mma::kTilePairs / 2]) {
  using namespace grouped_mma;
  const int32_t row = LaneRow(self.warp, self.lane).row();
  const int32_t t = self.lane % 4;
  const PrefillStorage::Stage& stage = shared.stages[self.ring.stage];
  const uint8_t* codes = stage.codes[self.warp / 2 % 4 * 32 + row] + t * 16;
  const uint8_t* scales = stage.scales + t / 2 * kScaleBlockBytes + row * 16 +
                          self.warp / 2 % 4 * 4 + t % 2 * 2;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    sums[i] = 0.0f;
  }
  RawUnit raw;
  const auto load = [&](int k) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      raw.codes[r] = *reinterpret_cast<const uint4*>(codes + r * 8 * Prefill::kRowBytes +
                                                     k * (kUnitColumns / 2));
      raw.scales[r] =
          *reinterpret_cast<const uint16_t*>(scales + r * 128 + k * 2 * kScaleBlockBytes);
    }
  };
  ptx::mbarrier_wait(ptx::shared_address(&shared.full[self.ring.stage]), self.ring.parity);
#pragma unroll
  for (int k = 0; k < Prefill::kUnits; ++k) {
    if (first) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.pairs_full[k]), item_parity);
    }
    load(k);
    Fragments fragments;
    multiply_unit<N>(raw, ptx::shared_address(&shared.pairs[k]), fragments, sums);
    if (k + 1 == Prefill::kUnits) {  // the loads are in the fragments
      release_loaded(shared.empty[self.ring.stage], self.lane, fragments.step[7][2],
                     fragments.step[7][3]);
    }
    ptx::wgmma_wait_group<0>();
    if (last) {
      release(shared.pairs_empty[k], self.lane);
    }
  }
}

// Stores 64 output columns of the tile's pairs: each lane two consecutive ones, a warp 16.
__device__ __forceinline__ void store_outputs(const Params& params, const PrefillItem& item,
                                              int32_t block, const MmaWarp& self,
                                              const float (&sums)[grouped_mma::kTilePairs / 2]) {
  const int32_t t = self.lane % 4;
  const int32_t row_columns = params.num_blocks * Prefill::kBlockRows;
  uint16_t* const rows = params.rows + block * Prefill::kBlockRows + self.warp / 2 % 4 * 32 +
                         2 * grouped_mma::LaneRow(self.warp, self.lane).feature();
  const int32_t count = item.count;
  const float alpha = item.alpha;
#pragma unroll
  for (int j = 0; j < grouped_mma::kTilePairs / 8; ++j) {
    if (8 * j < count) {
      const int2 ids = *reinterpret_cast<const int2*>(item.pair_ids + 8 * j + 2 * t);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int32_t pair = c == 0 ? ids.x : ids.y;
        if (pair >= 0) {
          *reinterpret_cast<__nv_bfloat162*>(rows + int64_t{pair} * row_columns) =
              __floats2bfloat162_rn(sums[4 * j + c] * alpha, sums[4 * j + 2 + c] * alpha);
        }
      }
    }
  }
}

__device__ __forceinline__ void mma_warp(const Params& params, PrefillStorage& shared,
                                         int32_t parts, int32_t warp, int32_t lane) {
  using namespace grouped_mma;
  MmaWarp self{warp, lane, {}};
  const int32_t turn = warp / 8;  // of the two pairs of warpgroups
  for (uint32_t item_parity = 0;; item_parity ^= 1) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.pairs_full[0]), item_parity);
    const PrefillItem& item = shared.items[item_parity];
    if (item.count == 0) {
      break;
    }
    const BlockRange blocks(params.num_blocks, parts, item.part);
    bool first = true;
    for (int32_t block = blocks.begin; block < blocks.end; ++block) {
      if (self.ring.stage % 2 == turn) {
        float sums[kTilePairs / 2];
        const bool last = block + 2 >= blocks.end;
        with_columns(item.count, [&]<int N>() {
          multiply_block<N>(shared, self, item_parity, first, last, sums);
        });
        store_outputs(params, item, block, self, sums);
        first = false;
      }
      self.ring.advance();
    }
    if (first) {  // this warpgroup had no block
      for (int k = 0; k < Prefill::kUnits; ++k) {
        ptx::mbarrier_wait(ptx::shared_address(&shared.pairs_full[k]), item_parity);
        release(shared.pairs_empty[k], lane);
      }
    }
  }
}

__global__ void __launch_bounds__(grouped_mma::kThreads, 1)
    cake_fc2_prefill_sm90(const __grid_constant__ Params params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  __trap();  // the plan never picks this kernel elsewhere
#else
  using namespace grouped_mma;
  extern __shared__ __align__(1024) uint8_t fc2_prefill_storage[];
  PrefillStorage& shared = *reinterpret_cast<PrefillStorage*>(fc2_prefill_storage);
  if (ptx::shared_address(&shared) % 1024 != 0) {
    __trap();  // the swizzle counts on it
  }
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Prefill::kStages; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[s]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[s]), kMmaWarps / 2);
    }
    for (int k = 0; k < Prefill::kUnits; ++k) {
      ptx::mbarrier_init(ptx::shared_address(&shared.pairs_full[k]), Prefill::kUnpackWarps);
      ptx::mbarrier_init(ptx::shared_address(&shared.pairs_empty[k]), kMmaWarps);
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
    mma_warp(params, shared, parts, warp, lane);
    return;
  }
  ptx::setmaxnreg_dec<kOtherRegisters>();
  const DealtItems items{params.tiles, *params.num_tiles, parts};
  if (warp < kMmaWarps + Prefill::kUnpackWarps) {
    ptx::griddepcontrol_wait();
    unpack_warps(params, shared, items, static_cast<int32_t>(threadIdx.x) - kMmaWarps * 32);
  } else if (lane == 0) {
    load_warp(params, shared, items);
  }
#endif
}

}  // namespace cake::fc2
