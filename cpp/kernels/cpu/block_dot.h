// Exact dot products between 32 prepared weight rows and a few quantized rows.
#pragma once

#include <cstdint>

namespace cake::cpu {

inline constexpr int32_t kBlockRows = 32;    // weight rows of a call
inline constexpr int32_t kBlockInputs = 32;  // at most so many quantized rows of a call

// One expert's prepared matrix [rows, columns].
struct WeightMatrix {
  const uint8_t* packed;  // [rows, columns/2]
  const uint8_t* sf;      // 128x4 interleaved
  int32_t columns;        // K, a multiple of 64
};

struct QuantizedRow {
  const uint8_t* packed;  // [columns/2]
  const uint8_t* sf;      // [columns/16], linear
};

// sums[i][r] = sum over K of weight(first_row + r, k) * input_i(k), each operand E2M1 * E4M3. A
// group of 16 products is summed in integers, groups in double: every partial sum is a multiple of
// 2^-20 below 2^35, so that the result is exact but for sums that use the full range of both
// scales.
void block_dot(const WeightMatrix& weights, int32_t first_row, const QuantizedRow* inputs,
               int32_t num_inputs, double (*sums)[kBlockRows]);

}  // namespace cake::cpu
