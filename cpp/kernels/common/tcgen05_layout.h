// Descriptors and layouts of the block-scaled FP4 matrix instruction (ptx/tcgen05.cuh), as plain
// formulas for host and device. tests/test_cute_oracle.cpp compares each with CuTe's.
#pragma once

#include <cstdint>

#include "common/nvfp4.h"

namespace cake::tcgen05 {

inline constexpr int kLanes = 128;      // of tensor memory; a row of the accumulator each
inline constexpr int kColumns = 512;    // 32-bit words of a lane
inline constexpr int kMmaRows = 128;    // M
inline constexpr int kMmaK = 64;        // columns of one instruction
inline constexpr int kLineK = 256;      // columns of a 128-byte line of an operand in shared memory
inline constexpr int kLineBytes = 128;  // shared memory row of an operand
inline constexpr int kMaxN = 256;       // a multiple of 8
inline constexpr int kScaleBlock = 512;  // bytes: 128 rows x 4 scales, common/layout.h

// --- Tensor memory -------------------------------------------------------------------------------

CAKE_HOST_DEVICE constexpr uint32_t tensor_address(uint32_t lane, uint32_t column) {
  return lane << 16 | column;
}

// Columns of the scales of `rows` rows for one instruction: row r has lane r % 32 of column r / 32,
// in every quarter of the lanes; byte g of the word scales columns 16g .. 16g + 15.
CAKE_HOST_DEVICE constexpr uint32_t scale_columns(uint32_t rows) { return (rows + 127) / 128 * 4; }

struct Position {
  int32_t lane, column;  // from the address of the load
};

// What word `word` of lane `lane` of a warp is in a load 16x256b.
CAKE_HOST_DEVICE constexpr Position position_16x256b(int32_t lane, int32_t word) {
  return {lane / 4 + word % 4 / 2 * 8, word / 4 * 8 + lane % 4 * 2 + word % 2};
}

// --- Shared memory -------------------------------------------------------------------------------

// Byte of column k (low nibble: even) of an operand's row, in lines of 128 bytes from a multiple of
// 1024 on, as TMA stores them with the 128-byte swizzle. The next kLineK columns follow after the
// last row.
CAKE_HOST_DEVICE constexpr uint32_t operand_offset(uint32_t row, uint32_t k) {
  return (row * kLineBytes + k / 2) ^ (row % 8 << 4);
}

// --- Descriptors ---------------------------------------------------------------------------------

enum class Swizzle : uint32_t { kNone = 0, k128Bytes = 2 };

// A matrix in shared memory, K contiguous. Byte counts are multiples of 16.
struct MatrixDescriptor {
  uint32_t address;        // shared, 32 bits
  uint32_t leading_bytes;  // between columns of core matrices; not used by ours
  uint32_t stride_bytes;   // between groups of 8 rows
  Swizzle swizzle;

  CAKE_HOST_DEVICE constexpr uint64_t encode() const {
    constexpr uint64_t kVersion = 1;
    return (address & 0x3FFFFu) >> 4 | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
           static_cast<uint64_t>(stride_bytes >> 4) << 32 | kVersion << 46 |
           static_cast<uint64_t>(swizzle) << 61;
  }
};

// kMmaK columns of an operand, columns 64 i .. of its lines at `address` + 32 i.
CAKE_HOST_DEVICE constexpr uint64_t operand_descriptor(uint32_t address) {
  return MatrixDescriptor{address, 16, 8 * kLineBytes, Swizzle::k128Bytes}.encode();
}

// A block of 128 x 4 scales, for tcgen05.cp.32x128b.
CAKE_HOST_DEVICE constexpr uint64_t scale_descriptor(uint32_t address) {
  return MatrixDescriptor{address, 16, 8 * 16, Swizzle::kNone}.encode();
}

// Adds bytes to a descriptor's address.
CAKE_HOST_DEVICE constexpr uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

// kind::mxf4nvf4, block16: E2M1 operands, K contiguous, E4M3 scales, M = 128, K = 64.
CAKE_HOST_DEVICE constexpr uint32_t instruction_descriptor(uint32_t n) {
  constexpr uint32_t kE2m1 = 1;
  return kE2m1 << 7 | kE2m1 << 10 | n / 8 << 17 | kMmaRows / 128 << 27;
}

}  // namespace cake::tcgen05
