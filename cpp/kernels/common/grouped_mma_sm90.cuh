// The matrix product that FC1 and FC2 share for many pairs per expert, sm_90a: prepared weight rows
// x the pairs of one expert on warpgroup MMA. Each MMA warpgroup has 64 weight rows: codes from
// shared memory to registers, dequantized there, times the pairs' rows, which lie in shared memory
// as half. Twelve or sixteen warps that dequantize keep the issue slots busy while some of them
// wait for their wgmmas. N may exceed the pairs that were loaded: what is left in those rows of
// shared memory gives sums that nobody stores.
//
// K goes in units of 128 columns. Within a unit, thread t of a quad owns columns 32t .. 32t + 31
// (16 bytes, two scales) of its weight rows; word v of these is taken through k steps 2v and 2v +
// 1, at the positions 2t, 2t + 1, 2t + 8, 2t + 9 in the order of dequantize8. The pairs' columns
// are put at the same positions, so the order cancels: in 16-byte chunk 4v + i of a unit lie, for t
// = 0 .. 3, elements i and i + 4 of columns 32t + 8v .. 32t + 8v + 7.
//
// Which prepared row a lane has is free, since A comes from registers: see LaneRow.
#pragma once

#include <cstdint>

#include "common/dequantize.cuh"
#include "ptx/wgmma.cuh"

namespace cake::grouped_mma {

inline constexpr int kWarpgroupRows = 64;
inline constexpr int kLoadWarps = 4;  // those that do not multiply

inline constexpr int kUnitColumns = 128;
inline constexpr int kScaleBlockBytes = 512;  // 128 rows x 4 scales

// Tiles of up to kPairs pairs, whose sums take kPairs / 2 registers of each thread of the
// kWarpgroups MMA warpgroups; N goes in steps of kColumnStep.
template <int kPairs, int kGroups, int kStep>
struct Shape {
  static constexpr int kTilePairs = kPairs;
  static constexpr int kPairRegisters = (kPairs + 31) / 32;  // a warp's pair ids, 32 in each
  static constexpr int kColumnStep = kStep;
  static constexpr int kWarpgroups = kGroups;
  static constexpr int kMmaWarps = 4 * kGroups;
  static constexpr int kThreads = (kMmaWarps + kLoadWarps) * 32;
  static_assert(kPairs % kStep == 0 && kPairs <= ptx::kWgmmaMostColumns);

  // Registers of a thread at launch, which are then moved to the MMA warpgroups. Together they must
  // not exceed the launch's: the CTA would wait for ever.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kLoadRegisters = kGroups == 4 ? 64 : 56;
  static constexpr int kMmaRegisters = kGroups == 4 ? 104 : 152;
  static_assert(kMmaWarps * kMmaRegisters + kLoadWarps * kLoadRegisters <=
                    (kMmaWarps + kLoadWarps) * kLaunchRegisters,
                "too many registers");
};

// Few pairs leave room in shared memory for larger stages of FC1.
using Short = Shape<64, 4, 8>;
// Four warpgroups fill the issue slots while they dequantize for few pairs, but leave registers for
// 88 pairs only.
using Narrow = Shape<88, 4, 8>;
// An expert with more pairs is dequantized once instead of twice.
using Wide = Shape<176, 3, 16>;

inline constexpr int kPairRowBytes = 128;  // 64 columns as half

// One unit of the tile's pairs: half, rows of 128 bytes, chunk c of row n at c ^ (n % 8).
template <int kPairs>
struct PairUnit {
  uint8_t blocks[2][kPairs * kPairRowBytes];
  static_assert(kPairs * kPairRowBytes % 1024 == 0, "a block must keep the swizzle's alignment");
};

// A lane's first MMA row within the 16 of its warp is prepared row 16a + r of the 32 rows that two
// warps share, the second one is 8 below. These are up and gate of feature 2r + a in FC1, outputs
// 4r + 2a and + 1 in FC2. The lanes of a quarter warp read 64 bytes each of two rows, which have to
// lie in different banks:
//   rows of 64 or 192 bytes                   neighbouring r; 8 consecutive features, 16 outputs a
//                                             warp
//   kSwizzled: 128 bytes, 128-byte swizzle    r and r + 4; two runs of 4 features a warp
template <bool kSwizzled = false>
struct LaneRow {
  int32_t r, a;

  __device__ __forceinline__ LaneRow(int32_t warp, int32_t lane)
      : r(kSwizzled ? 4 * (lane >> 2 & 1) + (lane >> 4) + 2 * (warp & 1)
                    : (lane >> 2 & 1) + 2 * (lane >> 4) + 4 * (warp & 1)),
        a(lane >> 3 & 1) {}

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
// adding to them. `pairs`: shared address of the PairUnit of two pairs for each sum of a thread.
template <int N, bool kFirst = false, int kSums>
__device__ __forceinline__ void multiply_unit(const RawUnit& raw, uint32_t pairs,
                                              Fragments& fragments, float (&sums)[kSums]) {
  constexpr int kBlockBytes = 2 * kSums * kPairRowBytes;
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
  const uint64_t first_step = ptx::wgmma_descriptor_swizzle128(pairs);
  ptx::wgmma_fence();
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    const uint64_t descriptor = first_step + (s / 4 * (kBlockBytes / 16) + s % 4 * 2);
    if (kFirst && s == 0) {
      ptx::wgmma_m64k16<N, false>(sums, fragments.step[s], descriptor);
    } else {
      ptx::wgmma_m64k16<N>(sums, fragments.step[s], descriptor);
    }
  }
  ptx::wgmma_commit_group();
}

// Calls run.operator()<N>() with the smallest N, a multiple of the shape's step, that holds `count`
// pairs.
template <class Shape, int N = Shape::kColumnStep, class Run>
__device__ __forceinline__ void with_columns(int32_t count, const Run& run) {
  if constexpr (N == Shape::kTilePairs) {
    run.template operator()<N>();
  } else if (count <= N) {
    run.template operator()<N>();
  } else {
    with_columns<Shape, N + Shape::kColumnStep>(count, run);
  }
}

}  // namespace cake::grouped_mma
