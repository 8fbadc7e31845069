// Recipe Q' on a GPU: what block_scale_intermediate and encode_intermediate of nvfp4.h define, in
// the instructions that exist for it.
#pragma once

#include <cstdint>

#include "common/dequantize.cuh"
#include "common/nvfp4.h"
#include "ptx/arithmetic.cuh"

namespace cake {

struct GroupScale {
  uint32_t sf;       // E4M3 byte
  float reciprocal;  // of its value, within 1 ulp; 0 for a zero scale
};

// `amax`: largest magnitude of the group, NaN only when all are NaN (fmaxf leaves NaN out).
__device__ __forceinline__ GroupScale group_scale(float amax, float q) {
  const uint32_t sf = ptx::cvt_e4m3(ptx::mul_rn_ftz(ptx::mul_rn_ftz(amax, q), kOneSixth));
  const float value = __low2float(as_half2(ptx::cvt_half2_e4m3x2(sf)));
  return {sf, sf != 0 ? ptx::rcp_approx(value) : 0.0f};
}

__device__ __forceinline__ uint32_t requantize(float value, const GroupScale& scale, float q) {
  return e2m1_encode(ptx::mul_rn_ftz(ptx::mul_rn_ftz(value, scale.reciprocal), q));
}

// The codes of two values in a byte, `first` in the low nibble.
__device__ __forceinline__ uint32_t requantize_pair(float first, float second,
                                                    const GroupScale& scale, float q) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return ptx::cvt_e2m1x2(ptx::mul_rn_ftz(ptx::mul_rn_ftz(first, scale.reciprocal), q),
                         ptx::mul_rn_ftz(ptx::mul_rn_ftz(second, scale.reciprocal), q));
#else
  return requantize(first, scale, q) | requantize(second, scale, q) << 4;
#endif
}

}  // namespace cake
