// What one warp multiplies in FC2 of the decode kernel, sm_90a: 32 prepared weight rows x up to
// 8 pairs, all 384 columns.
#pragma once

#include <cstdint>

#include "common/bf16_pair.cuh"
#include "common/dequantize.cuh"
#include "fc2/params.h"
#include "ptx/mma.cuh"

namespace cake::decode {

struct Fc2Block {
  static constexpr int kHidden = 3584;
  static constexpr int kIntermediate = 384;
  static constexpr int kRowBytes = kIntermediate / 2;
  static constexpr int kScaleRowBytes = kIntermediate / 16;
  static constexpr int kRows = 32;        // of a warp
  static constexpr int kScaleRows = 128;  // whose scales are interleaved
  static constexpr int kTilePairs = 8;
  static constexpr int kScaleBytes = kScaleRows * kScaleRowBytes;
};

// The intermediate of a lane's pair (of column `lane / 4`; negative: none), dequantized: columns
// 128c + 32t .. + 31, c = 0, 1, 2. Read past L1: the same launch has written it.
struct Fc2Pairs {
  uint32_t halves[3][4][4];

  __device__ __forceinline__ Fc2Pairs(const fc2::Params& params, int64_t pair, int32_t lane) {
    const int32_t t = lane % 4;
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      uint4 codes{};
      uint32_t scales = 0;
      if (pair >= 0) {
        codes = __ldcg(reinterpret_cast<const uint4*>(params.input + pair * Fc2Block::kRowBytes +
                                                      c * 64 + t * 16));
        scales = __ldcg(reinterpret_cast<const uint16_t*>(
            params.input_sf + pair * Fc2Block::kScaleRowBytes + c * 8 + t * 2));
      }
      const ScalePair scale = scale_pair(scales);
      dequantize8(codes.x, scale.first, halves[c][0]);
      dequantize8(codes.y, scale.first, halves[c][1]);
      dequantize8(codes.z, scale.second, halves[c][2]);
      dequantize8(codes.w, scale.second, halves[c][3]);
    }
  }
};

// A fragments of a warp's 32 rows, 128 columns: [16-row half][word][two rows of a lane, 8 codes].
struct Fc2Fragments {
  uint32_t halves[2][4][2][4];

  // `weights`: the warp's 32 rows in shared memory. `scales`: those of the 128 rows around them, of
  // which the warp's are the `quarter`-th 32. Columns 128c + 32t .. + 31 are the lane's.
  __device__ __forceinline__ Fc2Fragments(const uint8_t* weights, const uint8_t* scales,
                                          int32_t quarter, int32_t c, int32_t lane) {
    const int32_t g = lane / 4;
    const int32_t t = lane % 4;
    weights += g * Fc2Block::kRowBytes + t * 16;
    // Scale blocks of 512 bytes hold 4 columns: [row % 32][row / 32 % 4][column % 4].
    scales += t / 2 * 512 + g * 16 + quarter * 4 + t % 2 * 2;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {  // row 16m + 8r + g
        const int eight = 2 * m + r;
        const uint4 codes =
            *reinterpret_cast<const uint4*>(weights + eight * 8 * Fc2Block::kRowBytes + c * 64);
        const ScalePair scale =
            scale_pair(*reinterpret_cast<const uint16_t*>(scales + c * 1024 + eight * 128));
        dequantize8(codes.x, scale.first, halves[m][0][r]);
        dequantize8(codes.y, scale.first, halves[m][1][r]);
        dequantize8(codes.z, scale.second, halves[m][2][r]);
        dequantize8(codes.w, scale.second, halves[m][3][r]);
      }
    }
  }

  // Depends on all of them.
  __device__ __forceinline__ uint32_t any() const {
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      all |= halves[i / 32][i / 8 % 4][i / 4 % 2][i % 4];
    }
    return all;
  }
};

// Sums of the four prepared rows g, g + 8, g + 16, g + 24 of a lane (g = lane / 4), which are four
// consecutive outputs, for pairs 2t and 2t + 1.
struct Fc2Sums {
  float sums[2][4] = {};

  // Adds the products of columns 128c .. 128c + 127.
  __device__ __forceinline__ void add(const Fc2Fragments& weights, const Fc2Pairs& pairs, int c) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t (&a)[4] = weights.halves[m][k][0];
        const uint32_t (&b)[4] = weights.halves[m][k][1];
        const uint32_t (&pair_words)[4] = pairs.halves[c][k];
        ptx::mma_m16n8k16(sums[m], a[0], b[0], a[1], b[1], pair_words[0], pair_words[1]);
        ptx::mma_m16n8k16(sums[m], a[2], b[2], a[3], b[3], pair_words[2], pair_words[3]);
      }
    }
  }

  // Depends on all that the warp has loaded.
  __device__ __forceinline__ uint32_t loaded() const {
    return __float_as_uint(sums[0][0]) | __float_as_uint(sums[1][0]);
  }

  // The outputs of pair 2t + j, bf16. `alpha` undoes the dequantization factors as well.
  __device__ __forceinline__ uint2 outputs(int j, float alpha) const {
    return make_uint2(bf16_pair(sums[0][j] * alpha, sums[0][2 + j] * alpha),
                      bf16_pair(sums[1][j] * alpha, sums[1][2 + j] * alpha));
  }
};

}  // namespace cake::decode
