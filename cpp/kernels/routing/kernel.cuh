// Routing and input quantization in one launch: independent blocks of one grid.
//
// The first cluster (one CTA, or kLargeCluster CTAs for many tokens) sorts the pairs by expert,
// token and slot, and cuts each expert's pairs into tiles.
//
// The other CTAs quantize tokens, a group of 16 a thread at a time. Everyone waits for the
// predecessor before the first read and releases the dependents at once: they wait for the end of
// this grid anyway.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "common/dequantize.cuh"
#include "common/quantize_group.cuh"
#include "ptx/pdl.cuh"
#include "routing/few.cuh"
#include "routing/params.cuh"
#include "routing/sort.cuh"

namespace cake::routing {

// Dequantizes a group into its 128-column unit of a row.
__device__ __forceinline__ void store_halves(uint32_t* row, int32_t group,
                                             const QuantizedGroup& quantized) {
  const __half2 scale = scale_pair(quantized.sf).first;
  uint32_t* const words = row + group / 8 * 64 + group % 2 * 32 + group % 8 / 2;
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    uint32_t pairs[4];
    dequantize8(v == 0 ? quantized.codes.x : quantized.codes.y, scale, pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[(4 * v + i) * 4] = pairs[i];
    }
  }
}

// Groups first, first + step, .. of the input; the next one is on its way while one is quantized.
template <bool kAligned16>
__device__ __forceinline__ void quantize(const Params& params, int32_t first, int32_t step) {
  const float q = *params.input_scale;
  const auto load = [&](int32_t index) -> GroupWords {
    return index < params.num_groups
               ? load_group<kAligned16>(params.input + index / params.groups * params.input_stride +
                                        index % params.groups * 16)
               : GroupWords{};
  };
  GroupWords next = load(first);
  for (int32_t index = first; index < params.num_groups; index += step) {
    const GroupWords words = next;
    next = load(index + step);
    const QuantizedGroup out = quantize_group(words, q);
    params.packed[index] = out.codes;
    params.sf[index] = out.sf;
    if (params.halves != nullptr) {
      store_halves(params.halves + int64_t{index / params.groups} * params.groups * 8,
                   index % params.groups, out);
    }
  }
}

template <bool kAligned16>
__global__ void __launch_bounds__(kThreads, 1)
    cake_route_quantize(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) uint8_t routing_storage[];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const auto cluster_size = static_cast<int32_t>(cooperative_groups::this_cluster().num_blocks());
  if (static_cast<int32_t>(blockIdx.x) < cluster_size) {
    if (params.num_pairs <= kFewPairs) {
      route_few(params, *reinterpret_cast<FewStorage*>(routing_storage));
    } else if (cluster_size == 1) {
      route<false>(params, *reinterpret_cast<Sort<false>::Storage*>(routing_storage));
    } else {
      route<true>(params, *reinterpret_cast<Sort<true>::Storage*>(routing_storage));
    }
  } else {
    const auto block = static_cast<int32_t>(blockIdx.x) - cluster_size;
    const auto blocks = static_cast<int32_t>(gridDim.x) - cluster_size;
    quantize<kAligned16>(params, block * kThreads + static_cast<int32_t>(threadIdx.x),
                         blocks * kThreads);
  }
}

}  // namespace cake::routing
