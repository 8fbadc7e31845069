// The matrix product that FC1 and FC2 share for many pairs per expert, sm_90a:
// 128 prepared weight rows x up to 160 pairs of one expert, both NVFP4, on warpgroup MMA.
//
//   3 load warps         codes and scales of 128 rows x 128 columns per stage, by 16-byte copies;
//                        they take turns
//   5 unpack warps       quantized rows of the pairs, 128 columns per stage: loaded two stages
//   ahead,
//                        dequantized and stored as half in the swizzled form that wgmma reads
//   2 MMA warpgroups     64 weight rows each: codes to registers, dequantized there, times the
//   pairs
//
//   weights_full / weights_empty[s]   a load warp <-> MMA warps       (32 / 8 arrivals)
//   pairs_full / pairs_empty[s]       unpack warps <-> MMA warps      (5 / 8 arrivals)
//
// Within 64 columns, thread t of a quad owns columns 16t .. 16t + 15 (8 bytes, one scale) of its
// weight rows, and takes them through the MMA's k positions 2t, 2t + 1, 2t + 8, 2t + 9 in the order
// of dequantize8. The unpack warps put the pairs' columns at the same positions, so the order
// cancels.
//
// Row g of a warp's 16 MMA rows is prepared row 16 (g % 2) + g / 2 + 4 (warp % 2) of a 32-row
// block, row g + 8 the one 8 below. In FC1 these are up and gate of feature 8 (warp % 2) + g; in
// FC2 outputs 16 (warp % 2) + 2g and + 1.
#pragma once

#include <cstdint>

#include "common/dequantize.cuh"
#include "common/tile.h"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"

namespace cake::grouped_mma {

inline constexpr int kTilePairs = 160;  // most pairs of a tile: 80 sums of a thread
inline constexpr int kRows = 128;       // weight rows of an item
inline constexpr int kMmaWarps = 8;
inline constexpr int kUnpackWarps = 5;
inline constexpr int kLoadWarps = 3;
inline constexpr int kThreads = (kMmaWarps + kUnpackWarps + kLoadWarps) * 32;
inline constexpr int kUnpackThreads = kUnpackWarps * 32;
static_assert(kTilePairs == kUnpackThreads, "an unpack thread has one pair");

// Registers of a thread: 128 at launch (512 threads), then moved to the MMA warpgroups. Together
// they must not exceed the launch's: the CTA would wait for ever.
inline constexpr int kMmaRegisters = 160;
inline constexpr int kOtherRegisters = 96;
static_assert(kMmaRegisters + kOtherRegisters <= 2 * 128, "more registers than launched");

inline constexpr int kBlockColumns = 64;                 // one 128-byte row of halves
inline constexpr int kStageColumns = 2 * kBlockColumns;  // of a weight stage and of a pairs stage
inline constexpr int kWeightStages = 8;
inline constexpr int kPairStages = 3;
inline constexpr int kWeightStageBytes = kRows * kStageColumns / 2;
inline constexpr int kPairBlockBytes = kTilePairs * kBlockColumns * 2;
inline constexpr int kScaleBlockBytes = 512;  // 128 rows x 4 scales

struct Storage {
  uint8_t pairs[kPairStages][2][kPairBlockBytes];     // half, 128-byte swizzled rows
  uint8_t weights[kWeightStages][kWeightStageBytes];  // see weight_offset
  uint8_t scales[kWeightStages][2 * kScaleBlockBytes];
  float amax[kMmaWarps][kTilePairs];  // for epilogues
  int32_t pair_ids[2][kTilePairs];    // of an item and the one after it
  uint64_t weights_full[kWeightStages];
  uint64_t weights_empty[kWeightStages];
  uint64_t pairs_full[kPairStages];
  uint64_t pairs_empty[kPairStages];
};
static_assert(sizeof(Storage) <= 232448, "shared memory exceeds 227 KB");
static_assert(kPairBlockBytes % 1024 == 0, "a block must keep the swizzle's alignment");

__device__ __forceinline__ void init_barriers(Storage& shared) {
  for (int s = 0; s < kWeightStages; ++s) {
    ptx::mbarrier_init(ptx::shared_address(&shared.weights_full[s]), 32);
    ptx::mbarrier_init(ptx::shared_address(&shared.weights_empty[s]), kMmaWarps);
  }
  for (int s = 0; s < kPairStages; ++s) {
    ptx::mbarrier_init(ptx::shared_address(&shared.pairs_full[s]), kUnpackWarps);
    ptx::mbarrier_init(ptx::shared_address(&shared.pairs_empty[s]), kMmaWarps);
  }
  ptx::fence_mbarrier_init();
}

// Byte of a weight stage: 64 bytes a row (two blocks of 32); rows 16 apart swap their blocks, so
// that the rows that a warp reads together lie in different banks.
__device__ __forceinline__ int32_t weight_offset(int32_t row, int32_t block) {
  return row * 64 + (block ^ (row >> 4 & 1)) * 32;
}

// Stage and parity of the n-th use of a ring.
template <int kStages>
struct Slot {
  int32_t stage;
  uint32_t parity;
  __device__ __forceinline__ explicit Slot(uint32_t n)
      : stage(static_cast<int32_t>(n % kStages)), parity(n / kStages & 1) {}
};

// Copies one item's weights: `codes` points at row 0 of the item (kColumns / 2 bytes a row),
// `scales` at its first scale block. `uses` counts stages since the kernel began.
template <int kColumns>
__device__ __forceinline__ void load_item(Storage& shared, const uint8_t* codes,
                                          const uint8_t* scales, uint32_t load_warp, int32_t lane,
                                          uint32_t& uses) {
  constexpr int kRowBytes = kColumns / 2;
  const uint8_t* source = codes + lane / 4 * kRowBytes + lane % 4 * 16;
  for (int32_t k = 0; k < kColumns / kStageColumns; ++k, ++uses) {
    if (uses % kLoadWarps != load_warp) {
      continue;
    }
    const Slot<kWeightStages> slot(uses);
    ptx::mbarrier_wait(ptx::shared_address(&shared.weights_empty[slot.stage]), slot.parity ^ 1);
    const uint32_t weights = ptx::shared_address(shared.weights[slot.stage]);
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
      const int32_t row = lane / 4 + 8 * i;
      ptx::cp_async_16(weights + weight_offset(row, lane % 4 / 2) + lane % 2 * 16,
                       source + i * 8 * kRowBytes + k * 64);
    }
    const uint32_t destination = ptx::shared_address(shared.scales[slot.stage]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t offset = (lane + 32 * i) * 16;
      ptx::cp_async_16(destination + offset, scales + k * 2 * kScaleBlockBytes + offset);
    }
    ptx::cp_async_mbarrier_arrive_noinc(ptx::shared_address(&shared.weights_full[slot.stage]));
  }
}

struct QuantizedRow {
  const uint8_t* codes;
  const uint8_t* scales;  // linear
};

// 64 columns of one quantized row.
struct PackedBlock {
  uint4 codes[2];
  uint32_t scales;
};

__device__ __forceinline__ PackedBlock load_block(const uint8_t* codes, const uint8_t* scales,
                                                  int32_t block) {
  const auto* source = reinterpret_cast<const uint4*>(codes + block * 32);
  return {{source[0], source[1]}, reinterpret_cast<const uint32_t*>(scales)[block]};
}

// Both halves hold scale `t` of the four in `word`.
__device__ __forceinline__ __half2 broadcast_scale(uint32_t word, int32_t t) {
  return as_half2(ptx::cvt_half2_e4m3x2(__byte_perm(word, 0, t * 0x11)));
}

// Dequantizes half a block (`v`: which word of every 16 columns) into row n of a block of a pairs
// stage.
__device__ __forceinline__ void store_half(const PackedBlock& block, int32_t v, uint8_t* rows,
                                           int32_t n) {
  const auto word = [&](int32_t t) {
    const uint4& codes = block.codes[t / 2];
    return t % 2 == 0 ? (v == 0 ? codes.x : codes.y) : (v == 0 ? codes.z : codes.w);
  };
  uint32_t pairs[4][4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    dequantize8(word(t), broadcast_scale(block.scales, t), pairs[t]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int32_t chunk = (4 * v + i) ^ (n % 8);
    *reinterpret_cast<uint4*>(rows + n * 128 + chunk * 16) =
        make_uint4(pairs[0][i], pairs[1][i], pairs[2][i], pairs[3][i]);
  }
}

// The items of a CTA in order, with what belongs to an item looked up one and two items before it
// is needed. Items(i) gives the tile of the CTA's i-th item, of count 0 beyond the last.
template <class Items>
class TileCursor {
 public:
  __device__ __forceinline__ explicit TileCursor(const Items& items)
      : items_(items), tile_(items(0)), next_(items(1)) {}

  __device__ __forceinline__ const Tile& tile() const { return tile_; }
  __device__ __forceinline__ const Tile& next() const { return next_; }
  __device__ __forceinline__ int32_t index() const { return index_; }

  __device__ __forceinline__ void advance() {
    ++index_;
    tile_ = next_;
    next_ = items_(index_ + 1);
  }

 private:
  const Items& items_;
  int32_t index_ = 0;
  Tile tile_;
  Tile next_;
};

// How the unpack threads share a stage: `rows` threads side by side, each with one pair and
// `blocks` blocks of it; with few pairs `parts` threads share a pair: its two blocks, then their
// halves.
struct Share {
  int32_t n;      // pair of the tile, beyond the tile's count for idle threads
  int32_t part;   // 0 .. parts - 1
  int32_t parts;  // 1: both blocks; 2: block `part`; 4: half `part % 2` of block `part / 2`
};

__device__ __forceinline__ Share unpack_share(int32_t thread, int32_t count) {
  const int32_t rows = count <= 32 ? 32 : count <= 80 ? 80 : kUnpackThreads;
  const int32_t parts = count <= 32 ? 4 : count <= 80 ? 2 : 1;
  const int32_t part = thread / rows;
  return {part < parts ? thread % rows : kTilePairs, part, parts};
}

// Dequantizes the pairs of all items of a CTA, 128 columns a stage. pair_id(tile, n) gives the
// pair, row(pair) its codes and scales.
template <int kColumns, class Items, class PairId, class Row>
__device__ __forceinline__ void unpack_items(Storage& shared, const Items& items,
                                             const PairId& pair_id, const Row& row,
                                             int32_t thread) {
  constexpr int kStages = kColumns / kStageColumns;
  static_assert(kStages >= kPairStages, "pair_ids would be overwritten while they are read");
  TileCursor<Items> cursor(items);
  const auto lookup = [&](const Tile& tile) {
    const int32_t n = unpack_share(thread, tile.count).n;
    return n < tile.count ? pair_id(tile, n) : -1;
  };
  uint32_t uses = 0;
  int32_t pair = lookup(cursor.tile());
  for (; cursor.tile().count > 0; cursor.advance()) {
    const Share share = unpack_share(thread, cursor.tile().count);
    const bool both = share.parts == 1;
    const int32_t own_block = share.parts == 4 ? share.part / 2 : both ? 0 : share.part;
    const auto fetch = [&](int32_t block) {
      PackedBlock out{};
      if (pair >= 0 && block < 2 * kStages) {
        const QuantizedRow source = row(pair);
        out = load_block(source.codes, source.scales, block);
      }
      return out;
    };
    // Ahead of the stage at hand: both blocks of the next one, or one block of each of the next
    // two.
    PackedBlock ahead[2] = {fetch(own_block), fetch(both ? 1 : 2 + own_block)};
    const int32_t next_pair = lookup(cursor.next());
    for (int32_t stage = 0; stage < kStages; ++stage, ++uses) {
      const PackedBlock current[2] = {ahead[0], ahead[1]};
      ahead[0] = both ? fetch(2 * stage + 2) : ahead[1];
      ahead[1] = fetch(both ? 2 * stage + 3 : 2 * stage + 4 + own_block);
      const Slot<kPairStages> slot(uses);
      ptx::mbarrier_wait(ptx::shared_address(&shared.pairs_empty[slot.stage]), slot.parity ^ 1);
      if (stage == 0 && share.part == 0 && share.n < kTilePairs) {
        // The MMA warps are past the item before the last.
        shared.pair_ids[cursor.index() % 2][share.n] = pair;
      }
      if (pair >= 0) {
        uint8_t (&blocks)[2][kPairBlockBytes] = shared.pairs[slot.stage];
        if (share.parts == 4) {
          store_half(current[0], share.part % 2, blocks[own_block], share.n);
        } else {
          store_half(current[0], 0, blocks[both ? 0 : own_block], share.n);
          store_half(current[0], 1, blocks[both ? 0 : own_block], share.n);
          if (both) {
            store_half(current[1], 0, blocks[1], share.n);
            store_half(current[1], 1, blocks[1], share.n);
          }
        }
      }
      ptx::fence_proxy_async();
      __syncwarp();
      if (thread % 32 == 0) {
        ptx::mbarrier_arrive(ptx::shared_address(&shared.pairs_full[slot.stage]));
      }
    }
    pair = next_pair;
  }
}

// A fragments of one 64-column block: four k steps.
struct Fragments {
  uint32_t step[4][4];
};

__device__ __forceinline__ void load_fragments(const Storage& shared, int32_t stage, int32_t block,
                                               int32_t row, int32_t t, Fragments& out) {
  uint32_t low[2][4];
  uint32_t high[2][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t n = row + 8 * r;
    const uint2 codes =
        *reinterpret_cast<const uint2*>(shared.weights[stage] + weight_offset(n, block) + t * 8);
    const uint32_t word = *reinterpret_cast<const uint32_t*>(
        shared.scales[stage] + block * kScaleBlockBytes + n % 32 * 16 + n / 32 * 4);
    const __half2 scale = broadcast_scale(word, t);
    dequantize8(codes.x, scale, r == 0 ? low[0] : high[0]);
    dequantize8(codes.y, scale, r == 0 ? low[1] : high[1]);
  }
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    out.step[s][0] = low[s / 2][2 * (s % 2)];
    out.step[s][1] = high[s / 2][2 * (s % 2)];
    out.step[s][2] = low[s / 2][2 * (s % 2) + 1];
    out.step[s][3] = high[s / 2][2 * (s % 2) + 1];
  }
}

// The prepared row of this lane's first MMA row within the 128 of an item.
__device__ __forceinline__ int32_t mma_row(int32_t warp, int32_t lane) {
  const int32_t g = lane / 4;
  return warp / 2 * 32 + warp % 2 * 4 + g % 2 * 16 + g / 2;
}

// Two groups of wgmmas a stage. The second block's fragments are made while the first group runs;
// while the next stage's first ones are made, the other warpgroup has the tensor cores.
template <int kColumns, int N>
__device__ __forceinline__ void multiply(Storage& shared, int32_t warp, int32_t lane,
                                         uint32_t weight_uses, uint32_t pair_uses,
                                         float (&sums)[kTilePairs / 2]) {
  constexpr int kStages = kColumns / kStageColumns;
  const int32_t row = mma_row(warp, lane);
  const int32_t t = lane % 4;
  const auto release = [&](uint64_t& barrier) {
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive(ptx::shared_address(&barrier));
    }
  };
  const auto wait_weights = [&](const Slot<kWeightStages>& slot) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.weights_full[slot.stage]), slot.parity);
  };
  const auto multiply_block = [&](Fragments& fragments, int32_t stage, int32_t block) {
    const uint64_t b =
        ptx::wgmma_descriptor_swizzle128(ptx::shared_address(shared.pairs[stage][block]));
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      ptx::wgmma_m64k16<N>(sums, fragments.step[s], b + s * 2);  // 32 bytes a step
    }
    ptx::wgmma_commit_group();
  };
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    sums[i] = 0.0f;
  }
  Fragments first;
  Fragments second;
  wait_weights(Slot<kWeightStages>(weight_uses));
  load_fragments(shared, Slot<kWeightStages>(weight_uses).stage, 0, row, t, first);
  for (int32_t k = 0; k < kStages; ++k) {
    const Slot<kWeightStages> weights(weight_uses + k);
    const Slot<kPairStages> pairs(pair_uses + k);
    ptx::mbarrier_wait(ptx::shared_address(&shared.pairs_full[pairs.stage]), pairs.parity);
    multiply_block(first, pairs.stage, 0);
    load_fragments(shared, weights.stage, 1, row, t, second);
    release(shared.weights_empty[weights.stage]);
    multiply_block(second, pairs.stage, 1);
    ptx::wgmma_wait_group<0>();
    release(shared.pairs_empty[pairs.stage]);
    if (k + 1 < kStages) {
      const Slot<kWeightStages> next(weight_uses + k + 1);
      wait_weights(next);
      load_fragments(shared, next.stage, 0, row, t, first);
    }
  }
}

// multiply() with the smallest N that holds `count` pairs; advances the counters.
template <int kColumns>
__device__ __forceinline__ void multiply_tile(Storage& shared, int32_t count, int32_t warp,
                                              int32_t lane, uint32_t& weight_uses,
                                              uint32_t& pair_uses, float (&sums)[kTilePairs / 2]) {
  const auto run = [&]<int N>() {
    multiply<kColumns, N>(shared, warp, lane, weight_uses, pair_uses, sums);
  };
  switch ((count + 15) / 16) {
    case 1:
      run.template operator()<16>();
      break;
    case 2:
      run.template operator()<32>();
      break;
    case 3:
      run.template operator()<48>();
      break;
    case 4:
      run.template operator()<64>();
      break;
    case 5:
      run.template operator()<80>();
      break;
    case 6:
      run.template operator()<96>();
      break;
    case 7:
      run.template operator()<112>();
      break;
    case 8:
      run.template operator()<128>();
      break;
    case 9:
      run.template operator()<144>();
      break;
    default:
      run.template operator()<160>();
      break;
  }
  weight_uses += kColumns / kStageColumns;
  pair_uses += kColumns / kStageColumns;
}

}  // namespace cake::grouped_mma
