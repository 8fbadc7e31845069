// E2M1 codes times an E4M3 block scale, as half, exactly.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "ptx/arithmetic.cuh"

namespace cake {

// A dequantized operand carries this factor, two of them leave 2^-28 in a dot product.
inline constexpr float kDequantizedSquare = 268435456.0f;  // 2^28, undoes both

__device__ __forceinline__ __half2 as_half2(uint32_t bits) {
  return *reinterpret_cast<__half2*>(&bits);
}
__device__ __forceinline__ uint32_t as_bits(__half2 value) {
  return *reinterpret_cast<uint32_t*>(&value);
}

// Eight codes of one group of 16 -> four half2, each code's value * scale * 2^-14. Pair i holds
// elements i and i + 4: an order that cancels when both operands are unpacked this way.
// The magnitude bits of a code, placed at bits 11..9 of a half, are exactly value * 2^-14 (the
// subnormal code included), and value * E4M3 * 2^-14 is a multiple of 2^-24: nothing is rounded.
__device__ __forceinline__ void dequantize8(uint32_t codes, __half2 scale, uint32_t (&pairs)[4]) {
  constexpr uint32_t kSignAndMagnitude = 0x8E008E00u;
  constexpr uint32_t kSign = 0x80808080u;
  const uint32_t high = ptx::lop3_select<kSign>(codes, codes >> 3);      // odd elements
  const uint32_t low = ptx::lop3_select<kSign>(codes << 4, codes << 1);  // even elements
  pairs[0] = as_bits(__hmul2(as_half2((low << 8) & kSignAndMagnitude), scale));
  pairs[1] = as_bits(__hmul2(as_half2((high << 8) & kSignAndMagnitude), scale));
  pairs[2] = as_bits(__hmul2(as_half2(low & kSignAndMagnitude), scale));
  pairs[3] = as_bits(__hmul2(as_half2(high & kSignAndMagnitude), scale));
}

// The scales of codes 0..15 and 16..31 from two E4M3 bytes, each in both halves.
struct ScalePair {
  __half2 first;
  __half2 second;
};
__device__ __forceinline__ ScalePair scale_pair(uint32_t bytes) {
  const __half2 both = as_half2(ptx::cvt_half2_e4m3x2(bytes));
  return {__low2half2(both), __high2half2(both)};
}

}  // namespace cake
