// BF16 rows -> NVFP4 codes and linear block scales, recipe P. One thread quantizes one group of 16.
// Waits for its predecessor before the first read; releases its dependents at the start, since
// they wait for its end anyway.
#pragma once

#include <cstdint>

#include "common/quantize_group.cuh"
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
  const QuantizedGroup out =
      quantize_group(load_group<kAligned16>(params.input + row * params.input_stride + group * 16),
                     *params.input_scale);
  params.packed[index] = out.codes;
  params.sf[index] = out.sf;
}

}  // namespace cake::quantize
