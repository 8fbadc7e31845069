// The matrix product that FC1 and FC2 share for many pairs per expert, sm_90a: prepared weight rows
// x up to 88 pairs of one expert on warpgroup MMA. Four MMA warpgroups have 64 weight rows each:
// codes from shared memory to registers, dequantized there, times the pairs' rows, which lie in
// shared memory as half. Sixteen warps that dequantize keep the issue slots busy while some of them
// wait for their wgmmas.
//
// K goes in units of 128 columns. Within a unit, thread t of a quad owns columns 32t .. 32t + 31
// (16 bytes, two scales) of its weight rows; word v of these is taken through k steps 2v and 2v +
// 1, at the positions 2t, 2t + 1, 2t + 8, 2t + 9 in the order of dequantize8. The pairs' columns
// are put at the same positions, so the order cancels: in 16-byte chunk 4v + i of a unit lie, for t
// = 0 .. 3, elements i and i + 4 of columns 32t + 8v .. 32t + 8v + 7.
//
// Which prepared row a lane has is free, since A comes from registers: see mma_row.
#pragma once

#include <cstdint>

#include "common/dequantize.cuh"
#include "ptx/wgmma.cuh"

namespace cake::grouped_mma {

inline constexpr int kTilePairs = 88;  // most pairs of a tile: 44 sums of a thread
inline constexpr int kPairRegisters = (kTilePairs + 31) / 32;  // a warp's pair ids, 32 in each
static_assert(kTilePairs == ptx::kWgmmaMostColumns);
inline constexpr int kWarpgroups = 4;
inline constexpr int kMmaWarps = 4 * kWarpgroups;
inline constexpr int kWarpgroupRows = 64;

inline constexpr int kUnitColumns = 128;
inline constexpr int kScaleBlockBytes = 512;              // 128 rows x 4 scales
inline constexpr int kPairBlockBytes = kTilePairs * 128;  // 64 columns as half
static_assert(kPairBlockBytes % 1024 == 0, "a block must keep the swizzle's alignment");

// One unit of the tile's pairs: half, rows of 128 bytes, chunk c of row n at c ^ (n % 8).
struct PairUnit {
  uint8_t blocks[2][kPairBlockBytes];
};

// Registers of a thread: 96 at launch (20 warps), then moved to the MMA warpgroups. Together they
// must not exceed the launch's: the CTA would wait for ever.
inline constexpr int kOtherWarps = 4;
inline constexpr int kThreads = (kMmaWarps + kOtherWarps) * 32;
inline constexpr int kMmaRegisters = 104;
inline constexpr int kOtherRegisters = 64;
static_assert(kMmaWarps * kMmaRegisters + kOtherWarps * kOtherRegisters <=
                  (kMmaWarps + kOtherWarps) * 96,
              "too many registers");

// A lane's first MMA row within the 16 of its warp is prepared row 16a + r of the 32 rows that two
// warps share, the second one is 8 below. These are up and gate of feature 2r + a in FC1, outputs
// 4r + 2a and + 1 in FC2: 8 consecutive features, 16 consecutive outputs a warp. Lanes of a quarter
// warp have neighbouring r, which puts their 16-byte reads of rows of 64 or 192 bytes into
// different banks.
struct LaneRow {
  int32_t r, a;

  __device__ __forceinline__ LaneRow(int32_t warp, int32_t lane)
      : r((lane >> 2 & 1) + 2 * (lane >> 4) + 4 * (warp & 1)), a(lane >> 3 & 1) {}

  __device__ __forceinline__ int32_t row() const { return 16 * a + r; }
  __device__ __forceinline__ int32_t feature() const { return 2 * r + a; }
};

// Codes and scales of one unit of a lane's two rows.
struct RawUnit {
  uint4 codes[2];
  uint32_t scales[2];  // two E4M3 bytes each
};

// A fragments of one unit: eight k steps. They stay untouched while wgmmas read them.
struct Fragments {
  uint32_t step[8][4];
};

// Dequantizes a unit and starts its wgmmas, as one group; with kFirst they set the sums instead of
// adding to them. `pairs`: shared address of the PairUnit.
template <int N, bool kFirst = false>
__device__ __forceinline__ void multiply_unit(const RawUnit& raw, uint32_t pairs,
                                              Fragments& fragments, float (&sums)[kTilePairs / 2]) {
  const ScalePair low_scales = scale_pair(raw.scales[0]);
  const ScalePair high_scales = scale_pair(raw.scales[1]);
  const uint32_t low_words[4] = {raw.codes[0].x, raw.codes[0].y, raw.codes[0].z, raw.codes[0].w};
  const uint32_t high_words[4] = {raw.codes[1].x, raw.codes[1].y, raw.codes[1].z, raw.codes[1].w};
#pragma unroll
  for (int v = 0; v < 4; ++v) {
    uint32_t low[4];
    uint32_t high[4];
    dequantize8(low_words[v], v < 2 ? low_scales.first : low_scales.second, low);
    dequantize8(high_words[v], v < 2 ? high_scales.first : high_scales.second, high);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t (&step)[4] = fragments.step[2 * v + i];
      step[0] = low[2 * i];
      step[1] = high[2 * i];
      step[2] = low[2 * i + 1];
      step[3] = high[2 * i + 1];
    }
  }
  ptx::wgmma_fence();
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    const uint64_t descriptor =
        ptx::wgmma_descriptor_swizzle128(pairs + s / 4 * kPairBlockBytes) + s % 4 * 2;
    if (kFirst && s == 0) {
      ptx::wgmma_m64k16<N, false>(sums, fragments.step[s], descriptor);
    } else {
      ptx::wgmma_m64k16<N>(sums, fragments.step[s], descriptor);
    }
  }
  ptx::wgmma_commit_group();
}

// Calls run.operator()<N>() with the smallest N that holds `count` pairs.
template <int N = 8, class Run>
__device__ __forceinline__ void with_columns(int32_t count, const Run& run) {
  if constexpr (N == kTilePairs) {
    run.template operator()<N>();
  } else if (count <= N) {
    run.template operator()<N>();
  } else {
    with_columns<N + 8>(count, run);
  }
}

}  // namespace cake::grouped_mma
