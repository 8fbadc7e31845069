// Decoding of descriptors. What the kernels have no use for is refused, not guessed.
#pragma once

#include <cstdint>

#include "common/nvfp4.h"

namespace cake::model {

struct Matrix {
  uint32_t address, stride_bytes, version, base_offset, leading_mode, swizzle;
  bool reserved;  // a bit that must be zero is set
};

CAKE_HOST_DEVICE Matrix decode_matrix(uint64_t bits) {
  const auto field = [bits](int first, int count) {
    return static_cast<uint32_t>(bits >> first & ((1ull << count) - 1));
  };
  return {.address = field(0, 14) << 4,
          .stride_bytes = field(32, 14) << 4,
          .version = field(46, 3),
          .base_offset = field(49, 3),
          .leading_mode = field(52, 1),
          .swizzle = field(61, 3),
          .reserved = (field(14, 2) | field(30, 2) | field(53, 8)) != 0};
}

CAKE_HOST_DEVICE bool plain(const Matrix& m) {
  return m.version == 1 && m.base_offset == 0 && m.leading_mode == 0 && !m.reserved;
}

// An operand: 128-byte swizzle, row 0 in the first line of 1024 aligned bytes.
CAKE_HOST_DEVICE bool valid_operand(const Matrix& m) {
  return plain(m) && m.swizzle == 2 && m.address % 1024 < 128 && m.address % 32 == 0 &&
         m.stride_bytes % 1024 == 0;
}

// 32 rows of 16 bytes in groups of 8.
CAKE_HOST_DEVICE bool valid_scales(const Matrix& m) { return plain(m) && m.swizzle == 0; }

// Address of 16-byte chunk 0 or 1 of the 64 columns of an operand's row: bits 4 to 6 are XORed with
// bits 7 to 9.
CAKE_HOST_DEVICE uint32_t operand_chunk(const Matrix& m, uint32_t row, uint32_t chunk) {
  const uint32_t linear = m.address + row / 8 * m.stride_bytes + row % 8 * 128 + chunk * 16;
  return linear ^ (linear >> 7 & 7) << 4;
}

CAKE_HOST_DEVICE uint32_t scale_row(const Matrix& m, uint32_t row) {
  return m.address + row / 8 * m.stride_bytes + row % 8 * 16;
}

// kind::mxf4nvf4 with E2M1 operands, UE4M3 scales, M = 128, K = 64. Returns N, 0 if it is anything
// else.
CAKE_HOST_DEVICE uint32_t decode_instruction(uint32_t bits) {
  constexpr uint32_t kN = 0x3Fu << 17;
  constexpr uint32_t kExpected = 1u << 7 | 1u << 10 | 1u << 27;  // A, B: E2M1; M / 128
  const uint32_t n = (bits & kN) >> 17 << 3;
  return (bits & ~kN) == kExpected && n <= 256 ? n : 0;
}

}  // namespace cake::model
