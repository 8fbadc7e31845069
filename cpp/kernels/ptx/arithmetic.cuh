// Single arithmetic instructions that C++ does not name.
#pragma once

#include <cstdint>

namespace cake::ptx {

// Bits of `mask` from a, the others from b: one three-input logic operation.
template <uint32_t kMask>
__device__ __forceinline__ uint32_t lop3_select(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(out) : "r"(a), "r"(b), "n"(kMask));
  return out;
}

// Two E4M3 bytes (low 16 bits of `bytes`) as half2, exact.
__device__ __forceinline__ uint32_t cvt_half2_e4m3x2(uint32_t bytes) {
  uint32_t out;
  asm("{\n"
      ".reg .b16 pair;\n"
      "cvt.u16.u32 pair, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, pair;\n"
      "}"
      : "=r"(out)
      : "r"(bytes));
  return out;
}

// 1 / x within 1 ulp, subnormals as zero.
__device__ __forceinline__ float rcp_approx(float x) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// 2^x within 2 ulp, subnormals as zero.
__device__ __forceinline__ float ex2_approx(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// a * b, subnormals as zero.
__device__ __forceinline__ float mul_rn_ftz(float a, float b) {
  float out;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

// Any value, at no cost: for a register that is written before it is read, which the compiler
// cannot see.
__device__ __forceinline__ float undefined_float() {
  float out;
  asm("" : "=f"(out));
  return out;
}

// The same pointer, at no cost: the compiler no longer sees how it was computed, and so keeps it in
// a register instead of adding its terms at every use.
__device__ __forceinline__ const uint8_t* opaque(const uint8_t* pointer) {
  asm("" : "+l"(pointer));
  return pointer;
}

// The E4M3 byte nearest to x, saturating at 448; NaN gives 0x7F (plus sign).
__device__ __forceinline__ uint32_t cvt_e4m3(float x) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return pair & 0xFFu;
}

// The E2M1 codes nearest to two values, `low` in the low nibble, saturating at 6; NaN gives +6.
// sm_100a and sm_103a.
__device__ __forceinline__ uint32_t cvt_e2m1x2(float low, float high) {
  uint32_t out;
  asm("{\n"
      ".reg .b8 pair;\n"
      "cvt.rn.satfinite.e2m1x2.f32 pair, %2, %1;\n"
      "cvt.u32.u8 %0, pair;\n"
      "}"
      : "=r"(out)
      : "f"(low), "f"(high));
  return out;
}

}  // namespace cake::ptx
