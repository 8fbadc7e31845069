// Arithmetic of the block-scaled FP4 matrix instruction, for host and device: exact sums of 16
// products, one rounding for each that is added.
#pragma once

#include <cstdint>

#include "common/nvfp4.h"

namespace cake::model {

// Byte i of the result is byte selector[4i .. 4i + 2] of b:a.
CAKE_HOST_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(a, b, selector);
#else
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    out |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  }
  return out;
#endif
}

// sum + the products of four signed bytes each.
CAKE_HOST_DEVICE int32_t dot4(uint32_t a, uint32_t b, int32_t sum) {
#ifdef __CUDA_ARCH__
  return __dp4a(static_cast<int32_t>(a), static_cast<int32_t>(b), sum);
#else
  for (int i = 0; i < 4; ++i) {
    sum += static_cast<int8_t>(a >> 8 * i) * static_cast<int8_t>(b >> 8 * i);
  }
  return sum;
#endif
}

// Four E2M1 codes (low 16 bits) as signed bytes, twice their values.
CAKE_HOST_DEVICE uint32_t doubled_e2m1x4(uint32_t codes) {
  const uint32_t magnitudes = codes & 0x7777u;
  const uint32_t plus = permute_bytes(0x03020100u, 0x0C080604u, magnitudes);
  const uint32_t minus = permute_bytes(0xFDFEFF00u, 0xF4F8FAFCu, magnitudes);
  const uint32_t negative = permute_bytes(0x0000FF00u, 0, codes >> 3 & 0x1111u);
  return (plus & ~negative) | (minus & negative);
}

// UE4M3. NaN also for bytes with a sign, whose meaning is not documented.
CAKE_HOST_DEVICE float scale_value(uint32_t byte) {
  const uint32_t exponent = byte >> 3 & 15;
  const uint32_t mantissa = byte & 7;
  if (byte >= 0x7F) {
    return bits_float(0x7FFFFFFFu);
  }
  return exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f
                       : bits_float((exponent + 120) << 23 | mantissa << 20);
}

// 64 codes of a row as signed bytes; word i holds columns 4i .. 4i + 3.
struct Row {
  uint32_t words[16];
};

CAKE_HOST_DEVICE void decode_row(const uint32_t (&codes)[8], Row& row) {
  for (int i = 0; i < 8; ++i) {
    row.words[2 * i] = doubled_e2m1x4(codes[i]);
    row.words[2 * i + 1] = doubled_e2m1x4(codes[i] >> 16);
  }
}

// sum + a . b over columns 16 group .. 16 group + 15, with the scales in byte `group` of each word.
template <class WordOfB>
CAKE_HOST_DEVICE float add_group(float sum, const Row& a, const WordOfB& b, uint32_t a_scale,
                                 uint32_t b_scale, int group) {
  int32_t dot = 0;
  for (int i = 0; i < 4; ++i) {
    dot = dot4(a.words[4 * group + i], b(4 * group + i), dot);
  }
  const float scale = scale_value(a_scale >> 8 * group & 0xFF) *
                      scale_value(b_scale >> 8 * group & 0xFF);  // exact, as the next product
  const float product = 0.25f * static_cast<float>(dot) * scale;
  return rn::add(sum, product);
}

}  // namespace cake::model
