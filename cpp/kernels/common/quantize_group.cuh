// Quantizes one group of 16 BF16 values, recipe P. One thread.
#pragma once

#include <cstdint>

#include "common/nvfp4.h"

namespace cake {

struct QuantizedGroup {
  uint2 codes;  // 16 codes, element 0 in the lowest nibble
  uint8_t sf;
};

// 16 BF16 values, two in a word, the first one in its low half.
struct GroupWords {
  uint32_t words[8];
};

// Whether kAligned16 holds for the groups of BF16 rows that are `stride` elements apart.
inline bool rows_are_aligned(const void* rows, int64_t stride) {
  return reinterpret_cast<uintptr_t>(rows) % 16 == 0 && stride % 8 == 0;
}

// kAligned16: the group starts at a multiple of 16 bytes.
template <bool kAligned16>
__device__ __forceinline__ GroupWords load_group(const uint16_t* source) {
  GroupWords group;
  if constexpr (kAligned16) {
    const uint4 low = reinterpret_cast<const uint4*>(source)[0];
    const uint4 high = reinterpret_cast<const uint4*>(source)[1];
    group = {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      group.words[i] = source[2 * i] | uint32_t{source[2 * i + 1]} << 16;
    }
  }
  return group;
}

__device__ __forceinline__ QuantizedGroup quantize_group(const GroupWords& group, float q) {
  float values[16];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[2 * i] = bits_float(group.words[i] << 16);
    values[2 * i + 1] = bits_float(group.words[i] & 0xFFFF0000u);
  }
  float amax = max_magnitude(values[0], values[1]);
#pragma unroll
  for (int i = 2; i < 16; ++i) {
    amax = max_magnitude(amax, values[i]);
  }
  const BlockScale scale = block_scale_precise(amax, q);
  uint2 codes{0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    codes.x |= encode_precise(values[i], scale) << (4 * i);
    codes.y |= encode_precise(values[8 + i], scale) << (4 * i);
  }
  return {codes, scale.sf};
}

}  // namespace cake
