// Tensor maps for TMA, encoded on the host at every launch and passed as kernel parameters.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cake/status.h"

namespace cake {

// Map of a matrix of bytes, `rows` contiguous rows of `row_bytes`, to be copied in boxes of
// `box_bytes` of `box_rows` rows, which lie densely in shared memory.
Status make_byte_map(const void* base, uint64_t rows, uint64_t row_bytes, uint32_t box_rows,
                     uint32_t box_bytes, CUtensorMap* map);

// The same in boxes of 128 bytes with the 128-byte swizzle: 16-byte chunk c of the shared memory
// line at address a lies at c ^ (a / 128 % 8).
Status make_swizzled_byte_map(const void* base, uint64_t rows, uint64_t row_bytes,
                              uint32_t box_rows, CUtensorMap* map);

}  // namespace cake
