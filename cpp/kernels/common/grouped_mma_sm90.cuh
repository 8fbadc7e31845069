// The matrix product that FC1 and FC2 share for many pairs per expert, sm_90a:
// 128 prepared weight rows x up to 192 pairs of one expert, both NVFP4, on warpgroup MMA.
//
//   load warp            codes and scales of 128 rows x 128 columns per stage, by 16-byte copies
//   3 unpack warps       quantized rows of the pairs, 64 columns per stage: loaded, dequantized and
//                        stored as half in the swizzled form that wgmma reads
//   2 MMA warpgroups     64 weight rows each: codes to registers, dequantized there, times the
//   pairs
//
//   weights_full / weights_empty[s]   load warp <-> MMA warps         (32 / 8 arrivals)
//   pairs_full / pairs_empty[s]       unpack warps <-> MMA warps      (3 / 8 arrivals)
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

inline constexpr int kTilePairs = 192;  // most pairs of a tile: 96 sums of a thread
inline constexpr int kRows = 128;       // weight rows of an item
inline constexpr int kMmaWarps = 8;
inline constexpr int kUnpackWarps = 3;  // with the load warp, the third warpgroup
inline constexpr int kThreads = (kMmaWarps + kUnpackWarps + 1) * 32;
inline constexpr int kUnpackThreads = kUnpackWarps * 32;
static_assert(kTilePairs == 2 * kUnpackThreads, "an unpack thread has two pairs");

// Registers of a thread: 168 at launch (384 threads), then moved to the MMA warpgroups. Both
// together must not exceed the launch's: the CTA would wait for ever.
inline constexpr int kMmaRegisters = 208;
inline constexpr int kOtherRegisters = 88;
static_assert(8 * kMmaRegisters + 4 * kOtherRegisters <= 12 * 168, "more registers than launched");

inline constexpr int kBlockColumns = 64;  // of a pairs stage and a step of the loop
inline constexpr int kWeightStages = 8;
inline constexpr int kPairStages = 4;
inline constexpr int kWeightStageBytes = kRows * kBlockColumns;  // codes of two blocks
inline constexpr int kScaleBlockBytes = 512;                     // 128 rows x 4 scales

struct Storage {
  uint8_t pairs[kPairStages][kTilePairs * kBlockColumns * 2];  // half, 128-byte swizzled rows
  uint8_t weights[kWeightStages][kWeightStageBytes];           // see weight_offset
  uint8_t scales[kWeightStages][2 * kScaleBlockBytes];
  float amax[kMmaWarps][kTilePairs];  // for epilogues
  uint64_t weights_full[kWeightStages];
  uint64_t weights_empty[kWeightStages];
  uint64_t pairs_full[kPairStages];
  uint64_t pairs_empty[kPairStages];
};
static_assert(sizeof(Storage) <= 232448, "shared memory exceeds 227 KB");
static_assert(kTilePairs * kBlockColumns * 2 % 1024 == 0,
              "a stage must keep the swizzle's alignment");

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
                                          const uint8_t* scales, int32_t lane, uint32_t& uses) {
  constexpr int kRowBytes = kColumns / 2;
  const uint8_t* source = codes + lane / 4 * kRowBytes + lane % 4 * 16;
  for (int32_t k = 0; k < kColumns / 128; ++k, ++uses) {
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

// Dequantizes a block into row n of a pairs stage.
__device__ __forceinline__ void store_block(const PackedBlock& block, uint8_t* stage, int32_t n) {
  __half2 scale[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    scale[t] = broadcast_scale(block.scales, t);
  }
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    uint32_t pairs[4][4];
    dequantize8(v == 0 ? block.codes[0].x : block.codes[0].y, scale[0], pairs[0]);
    dequantize8(v == 0 ? block.codes[0].z : block.codes[0].w, scale[1], pairs[1]);
    dequantize8(v == 0 ? block.codes[1].x : block.codes[1].y, scale[2], pairs[2]);
    dequantize8(v == 0 ? block.codes[1].z : block.codes[1].w, scale[3], pairs[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t chunk = (4 * v + i) ^ (n % 8);
      *reinterpret_cast<uint4*>(stage + n * 128 + chunk * 16) =
          make_uint4(pairs[0][i], pairs[1][i], pairs[2][i], pairs[3][i]);
    }
  }
}

// Dequantizes the pairs of one item, 64 columns a stage. source(n) gives codes and scales of pair n
// of the tile. With at most 32 pairs every warp works on a stage of its own.
template <int kColumns, class Source>
__device__ __forceinline__ void unpack_item(Storage& shared, int32_t count, const Source& source,
                                            int32_t thread, uint32_t& uses) {
  constexpr int kBlocks = kColumns / kBlockColumns;
  const int32_t rows = count <= 32 ? 32 : kUnpackThreads;  // of a team
  const int32_t teams = kUnpackThreads / rows;
  const int32_t n = thread % rows;
  const bool first = n < count;
  const bool second = n + kUnpackThreads < count;
  const QuantizedRow row = source(first ? n : 0);
  const QuantizedRow row2 = source(second ? n + kUnpackThreads : 0);
  PackedBlock next{};
  int32_t block = thread / rows;
  if (first && block < kBlocks) {
    next = load_block(row.codes, row.scales, block);
  }
  for (; block < kBlocks; block += teams) {
    const PackedBlock current = next;
    PackedBlock other{};
    if (second) {
      other = load_block(row2.codes, row2.scales, block);
    }
    if (first && block + teams < kBlocks) {
      next = load_block(row.codes, row.scales, block + teams);
    }
    const Slot<kPairStages> slot(uses + block);
    ptx::mbarrier_wait(ptx::shared_address(&shared.pairs_empty[slot.stage]), slot.parity ^ 1);
    if (first) {
      store_block(current, shared.pairs[slot.stage], n);
    }
    if (second) {
      store_block(other, shared.pairs[slot.stage], n + kUnpackThreads);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (thread % 32 < teams) {  // a team of fewer warps arrives for all
      ptx::mbarrier_arrive(ptx::shared_address(&shared.pairs_full[slot.stage]));
    }
  }
  uses += kBlocks;
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

template <int kColumns, int N>
__device__ __forceinline__ void multiply(Storage& shared, int32_t warp, int32_t lane,
                                         uint32_t weight_uses, uint32_t pair_uses,
                                         float (&sums)[kTilePairs / 2]) {
  constexpr int kBlocks = kColumns / kBlockColumns;
  static_assert(kBlocks % 2 == 0, "two blocks share a weight stage");
  const int32_t row = mma_row(warp, lane);
  const int32_t t = lane % 4;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    sums[i] = 0.0f;
  }
  Fragments fragments[2];
  ptx::mbarrier_wait(
      ptx::shared_address(&shared.weights_full[Slot<kWeightStages>(weight_uses).stage]),
      Slot<kWeightStages>(weight_uses).parity);
  load_fragments(shared, Slot<kWeightStages>(weight_uses).stage, 0, row, t, fragments[0]);
  for (int32_t pair_of_blocks = 0; pair_of_blocks < kBlocks / 2; ++pair_of_blocks) {
    const Slot<kWeightStages> weights(weight_uses + pair_of_blocks);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Slot<kPairStages> pairs(pair_uses + 2 * pair_of_blocks + half);
      ptx::mbarrier_wait(ptx::shared_address(&shared.pairs_full[pairs.stage]), pairs.parity);
      const uint64_t b =
          ptx::wgmma_descriptor_swizzle128(ptx::shared_address(shared.pairs[pairs.stage]));
      ptx::wgmma_fence();
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        ptx::wgmma_m64k16<N>(sums, fragments[half].step[s], b + s * 2);  // 32 bytes a step
      }
      ptx::wgmma_commit_group();
      // The next block's fragments, while the tensor cores work.
      if (half == 0) {
        load_fragments(shared, weights.stage, 1, row, t, fragments[1]);
        __syncwarp();
        if (lane == 0) {
          ptx::mbarrier_arrive(ptx::shared_address(&shared.weights_empty[weights.stage]));
        }
      } else if (pair_of_blocks + 1 < kBlocks / 2) {
        const Slot<kWeightStages> next(weight_uses + pair_of_blocks + 1);
        ptx::mbarrier_wait(ptx::shared_address(&shared.weights_full[next.stage]), next.parity);
        load_fragments(shared, next.stage, 0, row, t, fragments[0]);
      }
      ptx::wgmma_wait_group<0>();
      if (lane == 0) {
        ptx::mbarrier_arrive(ptx::shared_address(&shared.pairs_empty[pairs.stage]));
      }
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
    case 10:
      run.template operator()<160>();
      break;
    case 11:
      run.template operator()<176>();
      break;
    default:
      run.template operator()<192>();
      break;
  }
  weight_uses += kColumns / 128;
  pair_uses += kColumns / kBlockColumns;
}

}  // namespace cake::grouped_mma
