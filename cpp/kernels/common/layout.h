// Where a prepared weight row and a prepared block scale lie. Formulas for any geometry.
#pragma once

#include <cstdint>

#include "common/nvfp4.h"

namespace cake {

// Prepared FC1 rows, per 32-row block: features 16b + {0,2,..,14} up, the same gate, then the odd
// features up, gate. half: 0 up, 1 gate. feature: 0 .. I-1. Returns the row in [0, 2I).
CAKE_HOST_DEVICE int32_t fc1_prepared_row(int32_t half, int32_t feature) {
  return 32 * (feature / 16) + 8 * (2 * (feature % 2) + half) + feature % 16 / 2;
}

// Output index of prepared FC2 row n.
CAKE_HOST_DEVICE int32_t fc2_logical_row(int32_t n) {
  return 32 * (n / 32) + 4 * (n % 8) + n % 32 / 8;
}

// Byte of the scale of row n, 0 .. 127, column c, 0 .. 3, in a block of 128 x 4 scales.
CAKE_HOST_DEVICE constexpr int32_t scale_block_offset(int32_t n, int32_t c) {
  return n % 32 * 16 + n / 32 * 4 + c;
}

// Byte offset of the scale of prepared row n, column c (16 elements each) in a matrix of `columns`
// scale columns: blocks of 128 rows x 4 columns, 512 bytes each.
CAKE_HOST_DEVICE int64_t scale_offset(int32_t n, int32_t c, int32_t columns) {
  return (static_cast<int64_t>(n / 128) * (columns / 4) + c / 4) * 512 +
         scale_block_offset(n % 128, c % 4);
}

}  // namespace cake
