// E2M1 codes of products on a GPU: what e2m1_encode of nvfp4.h defines, in fewer instructions.
#pragma once

#include <cstdint>

#include "common/nvfp4.h"

namespace cake {

// `product`: the result of a multiplication, whose NaN is positive on a GPU, so that it needs no
// care: fminf makes it 6. Adding 2^22 times the binade of the magnitude (of 1 at least) leaves
// magnitude / spacing, rounded to nearest even, in the low bits of the sum; two codes more for
// every doubling of the spacing, from the exponent of the sum. The 6 in the addend's low bits makes
// that exponent's part 0 for the first binade and keeps the sum's parity.
__device__ __forceinline__ uint32_t e2m1_encode_product(float product) {
  const float magnitude = fminf(fabsf(product), 6.0f);
  const uint32_t binade = float_bits(fmaxf(magnitude, 1.0f)) & 0x7F800000u;
  const uint32_t sum = float_bits(__fadd_rn(magnitude, bits_float(binade + (22u << 23) + 6)));
  return ((sum + (sum >> 22)) & 7u) | (float_bits(product) >> 28 & 8u);
}

}  // namespace cake
