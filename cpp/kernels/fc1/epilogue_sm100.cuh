// From FC1's sums in tensor memory to the requantized intermediate, sm_100a and sm_103a.
//
// Four groups of 8 rows of a warp's 32 are up and gate of the even features, then of the odd ones
// (common/layout.h), and a load 16x256b gives lane 4r + t rows r and r + 8 of columns 2t and 2t +
// 1: two loads bring up and gate of features 2r and 2r + 1 of the same two pairs. The 16 features
// of a group are in the 8 lanes of equal t.
#pragma once

#include <cstdint>

#include "common/model.cuh"
#include "common/requantize.cuh"
#include "common/situ.cuh"
#include "common/tcgen05_layout.h"
#include "common/tile.h"
#include "fc1/params.h"
#include "ptx/tcgen05.cuh"

namespace cake::fc1 {

inline constexpr int kPackedRowBytes = 192;  // of the result: 384 features
inline constexpr int kScaleRowBytes = 24;

// What the epilogue knows of an item.
struct Sm100Item {
  SituConstants situ;
  float alpha;
  float q_scale;    // encoding scale of the intermediate
  uint8_t* packed;  // this warp's 16 features of the tile's first pair, and their scale
  uint8_t* sf;
  int32_t count;

  __device__ __forceinline__ Sm100Item(const Params& params, const Tile& tile, int32_t group)
      : situ(params.situ_beta[tile.expert], params.situ_linear_beta[tile.expert]),
        alpha(params.fc1_alpha[tile.expert]),
        q_scale(params.fc2_input_scale[tile.expert]),
        packed(params.packed + int64_t{tile.first} * kPackedRowBytes + group * 8),
        sf(params.sf + int64_t{tile.first} * kScaleRowBytes + group),
        count(model::planted(PlantedBug::kTail) ? tile.count - 1 : tile.count) {}
};

// A whole warp: 16 features of pairs first .. first + 8 kBlocks - 1. Lane 4r + t holds features 2r
// and 2r + 1 of pairs 8b + 2t and 8b + 2t + 1.
template <int kBlocks>
__device__ __forceinline__ void store_features(const Sm100Item& item, uint32_t sums, int32_t first,
                                               int32_t lane) {
  constexpr uint32_t kAll = 0xFFFFFFFFu;
  uint32_t even[4 * kBlocks];  // of feature 2r: up of two pairs, then gate
  uint32_t odd[4 * kBlocks];   // of feature 2r + 1
  ptx::tcgen05_ld_16x256b(even, sums + first);
  ptx::tcgen05_ld_16x256b(odd, sums + tcgen05::tensor_address(16, first));
  if (!model::planted(PlantedBug::kMissingLoadWait)) {
    ptx::tcgen05_wait_ld(even, odd);
  }
  const int32_t r = lane / 4;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    uint32_t codes[2];  // of the lane's two features, a byte for each pair
    uint32_t sf[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const auto activation = [&](const uint32_t (&words)[4 * kBlocks]) {
        return situ(item.alpha * __uint_as_float(words[4 * b + 2 + c]),
                    item.alpha * __uint_as_float(words[4 * b + c]), item.situ);
      };
      const float values[2] = {activation(even), activation(odd)};
      float amax = fmaxf(fabsf(values[0]), fabsf(values[1]));
#pragma unroll
      for (int lanes = 4; lanes <= 16; lanes *= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(kAll, amax, lanes));
      }
      const GroupScale scale = group_scale(amax, item.q_scale);
      sf[c] = scale.sf;
      codes[c] = requantize_pair(values[0], values[1], scale, item.q_scale);
    }
    // Eight lanes bring their bytes together: of the second pair where r is odd, else of the first.
    const bool second = (r & 1) != 0;
    const uint32_t byte = __shfl_xor_sync(kAll, second ? codes[0] : codes[1], 4);
    uint32_t low = second ? byte | codes[1] << 8 : codes[0] | byte << 8;
    const uint32_t half = __shfl_xor_sync(kAll, low, 8);
    low = (r & 2) != 0 ? half | low << 16 : low | half << 16;
    const uint32_t high = __shfl_xor_sync(kAll, low, 16);
    const int32_t n = first + 8 * b + 2 * (lane % 4) + r;
    if (r < 2 && n < item.count) {
      *reinterpret_cast<uint2*>(item.packed + n * kPackedRowBytes) = make_uint2(low, high);
      item.sf[n * kScaleRowBytes] = static_cast<uint8_t>(second ? sf[1] : sf[0]);
    }
  }
}

}  // namespace cake::fc1
