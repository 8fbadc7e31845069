// NVFP4: E2M1 codes, E4M3 block scales, and the two block quantizers. One definition for host and
// device: a product or quotient below is one IEEE binary32 operation, rounded to nearest even.
// (Compile host code without floating-point contraction, device code without fast math.)
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define CAKE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define CAKE_HOST_DEVICE inline
#endif

namespace cake {

inline constexpr float kOneSixth = 0.16666667163372039794921875f;  // 0x3E2AAAAB
inline constexpr float kFloatMax = 3.402823466385288598117e38f;
inline constexpr uint8_t kE4m3Max = 0x7E;  // 448
inline constexpr uint8_t kE4m3NaN = 0x7F;

namespace rn {  // never contracted into a fused multiply-add
CAKE_HOST_DEVICE float mul(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
CAKE_HOST_DEVICE float add(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
CAKE_HOST_DEVICE float div(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
}  // namespace rn

CAKE_HOST_DEVICE uint32_t float_bits(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  return std::bit_cast<uint32_t>(value);
#endif
}

CAKE_HOST_DEVICE float bits_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

CAKE_HOST_DEVICE bool is_nan(float value) {
  return (float_bits(value) & 0x7FFFFFFFu) > 0x7F800000u;
}

CAKE_HOST_DEVICE float magnitude_of(float value) {
#ifdef __CUDA_ARCH__
  return fabsf(value);
#else
  return bits_float(float_bits(value) & 0x7FFFFFFFu);
#endif
}

// The smaller and the larger of two; NaN loses against a number.
CAKE_HOST_DEVICE float lesser(float a, float b) {
#ifdef __CUDA_ARCH__
  return fminf(a, b);
#else
  return is_nan(b) || a < b ? a : b;
#endif
}
CAKE_HOST_DEVICE float greater(float a, float b) {
#ifdef __CUDA_ARCH__
  return fmaxf(a, b);
#else
  return is_nan(b) || a > b ? a : b;
#endif
}

// Subnormal results become zero of the same sign, as in the products of recipe Q'.
CAKE_HOST_DEVICE float flush_to_zero(float value) {
  const uint32_t bits = float_bits(value);
  return (bits & 0x7F800000u) == 0 ? bits_float(bits & 0x80000000u) : value;
}

// ---- bfloat16 --------------------------------------------------------------------------------

CAKE_HOST_DEVICE float bf16_to_float(uint16_t bits) { return bits_float(uint32_t{bits} << 16); }

// Round to nearest even; every NaN becomes the quiet NaN 0x7FFF (as the GPU's conversion does).
CAKE_HOST_DEVICE uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_bits(value);
  if (is_nan(value)) {
    return 0x7FFF;
  }
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// ---- E2M1: sign, 2 exponent bits, 1 mantissa bit -----------------------------------------------

// Round to nearest even, saturating at 6; the sign is kept, NaN gives +6 (code 7). On a GPU `value`
// is the result of an operation, whose NaN is positive there, so that no branch is needed.
// Adding 2^22 times the binade of the magnitude (of 1 at least) leaves magnitude / spacing, rounded
// to nearest even, in the low bits of the sum; two codes more for every doubling of the spacing,
// from the exponent of the sum. The 6 in the addend's low bits makes that exponent's part 0 for the
// first binade and keeps the sum's parity.
CAKE_HOST_DEVICE uint32_t e2m1_encode(float value) {
  const float magnitude = lesser(magnitude_of(value), 6.0f);
  const uint32_t binade = float_bits(greater(magnitude, 1.0f)) & 0x7F800000u;
  const uint32_t sum = float_bits(rn::add(magnitude, bits_float(binade + (22u << 23) + 6)));
  const uint32_t code = ((sum + (sum >> 22)) & 7u) | (float_bits(value) >> 28 & 8u);
#ifdef __CUDA_ARCH__
  return code;
#else
  return is_nan(value) ? 7u : code;
#endif
}

// Twice the value of a code, an integer in [-12, 12].
CAKE_HOST_DEVICE int32_t e2m1_twice(uint32_t code) {
  const int32_t m = static_cast<int32_t>(code & 7u);
  const int32_t magnitude = m + (m > 4 ? m - 4 : 0) + (m > 6 ? 2 * (m - 6) : 0);
  return (code & 8u) != 0 ? -magnitude : magnitude;
}

// ---- E4M3: 4 exponent bits (bias 7), 3 mantissa bits, no Inf ------------------------------------

// Round to nearest even, saturating at 448; NaN gives 0x7F. The sign of a zero is dropped and a
// negative value never occurs: block scales are magnitudes.
CAKE_HOST_DEVICE uint8_t e4m3_encode(float value) {
  if (is_nan(value)) {
    return kE4m3NaN;
  }
  const uint32_t bits = float_bits(value) & 0x7FFFFFFFu;
  if (bits < 0x3C800000u) {                             // below 2^-6: subnormal, step 2^-9
    const float shifted = bits_float(bits) + 16384.0f;  // 2^14: one ulp is 2^-9
    return static_cast<uint8_t>(float_bits(shifted) & 0xFFu);
  }
  const uint32_t rounded = (bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20;  // 3 mantissa bits left
  const uint32_t code = rounded - ((127u - 7u) << 3);
  return code > kE4m3Max ? kE4m3Max : static_cast<uint8_t>(code);
}

CAKE_HOST_DEVICE float e4m3_decode(uint8_t byte) {
  const uint32_t magnitude = byte & 0x7Fu;
  const uint32_t sign = (byte & 0x80u) << 24;
  if (magnitude == kE4m3NaN) {
    return bits_float(sign | 0x7FC00000u);
  }
  if (magnitude < 8) {  // subnormal
    return bits_float(sign | float_bits(static_cast<float>(magnitude) * 0.001953125f));
  }
  return bits_float(sign | ((magnitude + ((127u - 7u) << 3)) << 20));
}

// ---- Block quantizers ---------------------------------------------------------------------------

struct BlockScale {
  uint8_t sf;        // E4M3 byte
  float multiplier;  // what brings a value to E2M1 range
};

// Recipe P (input and weights). `amax` is the largest magnitude of the 16 values, NaN only when
// all are NaN; `q` the encoding scale. The order of the products matters: (q * 1/6) first.
CAKE_HOST_DEVICE BlockScale block_scale_precise(float amax, float q) {
  if (amax == 0.0f) {
    return {0, 0.0f};
  }
  const uint8_t sf = e4m3_encode(rn::mul(amax, rn::mul(q, kOneSixth)));
  const float inverse = rn::div(1.0f, rn::mul(e4m3_decode(sf), rn::div(1.0f, q)));
  // A zero scale gives Inf: the largest float takes its place. NaN stays NaN.
  return {sf, inverse > kFloatMax ? kFloatMax : inverse};
}

// Recipe Q' (intermediate activation): another association, products flushed to zero.
CAKE_HOST_DEVICE BlockScale block_scale_intermediate(float amax, float q) {
  const float scaled = flush_to_zero(rn::mul(amax, q));
  const uint8_t sf = e4m3_encode(flush_to_zero(rn::mul(scaled, kOneSixth)));
  return {sf, sf != 0 ? rn::div(1.0f, e4m3_decode(sf)) : 0.0f};
}

CAKE_HOST_DEVICE uint32_t encode_precise(float value, BlockScale scale) {
  return e2m1_encode(rn::mul(value, scale.multiplier));
}

CAKE_HOST_DEVICE uint32_t encode_intermediate(float value, BlockScale scale, float q) {
  return e2m1_encode(flush_to_zero(rn::mul(flush_to_zero(rn::mul(value, scale.multiplier)), q)));
}

// The larger of two magnitudes; NaN is left only when both are NaN.
CAKE_HOST_DEVICE float max_magnitude(float a, float b) {
  return greater(magnitude_of(a), magnitude_of(b));
}

}  // namespace cake
