// BF16 rows -> NVFP4 codes and linear block scales, recipe P. One thread quantizes one group of 16.
// Waits for its predecessor before the first read; releases its dependents at the start, since
// they wait for its end anyway.
#pragma once

#include <cstdint>

#include "common/nvfp4.h"
#include "ptx/pdl.cuh"

namespace cake::quantize {

inline constexpr int kThreads = 128;

struct Params {
  const uint16_t* __restrict__ input;     // bf16 [rows, 16 * groups], input_stride elements a row
  const float* __restrict__ input_scale;  // [1] encoding scale
  uint2* __restrict__ packed;             // [rows, groups] of 16 codes
  uint8_t* __restrict__ sf;               // [rows, groups]
  int64_t input_stride;                   // elements
  int64_t count;                          // rows * groups
  int32_t groups;                         // of a row
};

// 16 BF16 values as eight 32-bit words, low half first.
template <bool kAligned16>
__device__ __forceinline__ void load_group(const uint16_t* source, uint32_t (&words)[8]) {
  if constexpr (kAligned16) {
    const uint4 low = reinterpret_cast<const uint4*>(source)[0];
    const uint4 high = reinterpret_cast<const uint4*>(source)[1];
    words[0] = low.x, words[1] = low.y, words[2] = low.z, words[3] = low.w;
    words[4] = high.x, words[5] = high.y, words[6] = high.z, words[7] = high.w;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      words[i] = source[2 * i] | uint32_t{source[2 * i + 1]} << 16;
    }
  }
}

template <bool kAligned16>
__global__ void __launch_bounds__(kThreads) cake_quantize(const __grid_constant__ Params params) {
  ptx::griddepcontrol_launch_dependents();
  const int64_t index = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (index >= params.count) {
    return;
  }
  const int64_t row = index / params.groups;
  const int64_t group = index % params.groups;
  ptx::griddepcontrol_wait();

  uint32_t words[8];
  load_group<kAligned16>(params.input + row * params.input_stride + group * 16, words);
  float values[16];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[2 * i] = bits_float(words[i] << 16);
    values[2 * i + 1] = bits_float(words[i] & 0xFFFF0000u);
  }
  float amax = max_magnitude(values[0], values[0]);
#pragma unroll
  for (int i = 1; i < 16; ++i) {
    amax = max_magnitude(amax, values[i]);
  }
  const BlockScale scale = block_scale_precise(amax, *params.input_scale);
  uint2 codes{0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    codes.x |= encode_precise(values[i], scale) << (4 * i);
    codes.y |= encode_precise(values[8 + i], scale) << (4 * i);
  }
  params.packed[index] = codes;
  params.sf[index] = scale.sf;
}

}  // namespace cake::quantize
