#include "cpu/block_dot.h"

#include <algorithm>

#include "common/layout.h"
#include "common/nvfp4.h"
#include "cpu/vectorized.h"

namespace cake::cpu {
namespace {

constexpr int32_t kGroup = 16;
constexpr int32_t kChunkGroups = 32;  // 32 rows of a chunk take 32 KB as int16: the L1 cache
constexpr int32_t kChunk = kChunkGroups * kGroup;

// Twice the E2M1 values. Within a group the low nibbles come first, then the high ones: both
// operands are unpacked the same way, so that their products still meet.
inline void unpack(const uint8_t* packed, int32_t groups, int16_t* values) {
  for (int32_t group = 0; group < groups; ++group) {
    for (int32_t i = 0; i < kGroup / 2; ++i) {
      const uint32_t byte = packed[group * (kGroup / 2) + i];
      values[group * kGroup + i] = static_cast<int16_t>(e2m1_twice(byte & 15u));
      values[group * kGroup + kGroup / 2 + i] = static_cast<int16_t>(e2m1_twice(byte >> 4));
    }
  }
}

CAKE_CPU_VECTORIZED
void chunk_dot(const int16_t* weights, const float* weight_scales, const int16_t* input,
               const float* input_scales, int32_t groups, double* sums) {
  for (int32_t row = 0; row < kBlockRows; ++row) {
    const int16_t* w = weights + row * kChunk;
    const float* s = weight_scales + row * kChunkGroups;
    double sum = sums[row];
    for (int32_t group = 0; group < groups; ++group) {
      int32_t dot = 0;
#pragma GCC unroll 1  // unrolled completely, the loop would no longer be vectorized
      for (int32_t i = 0; i < kGroup; ++i) {
        dot += int32_t{w[group * kGroup + i]} * int32_t{input[group * kGroup + i]};
      }
      // 8 and 12 significant bits: the product is exact in float32.
      sum += double{s[group] * input_scales[group] * static_cast<float>(dot)};
    }
    sums[row] = sum;
  }
}

CAKE_CPU_VECTORIZED
void unpack_weights(const WeightMatrix& weights, int32_t first_row, int32_t first_group,
                    int32_t groups, int16_t* values, float* scales) {
  const int32_t columns = weights.columns / kGroup;
  for (int32_t row = 0; row < kBlockRows; ++row) {
    const int32_t n = first_row + row;
    const uint8_t* packed = weights.packed + int64_t{n} * (weights.columns / 2);
    unpack(packed + first_group * (kGroup / 2), groups, values + row * kChunk);
    for (int32_t group = 0; group < groups; ++group) {
      scales[row * kChunkGroups + group] =
          e4m3_decode(weights.sf[scale_offset(n, first_group + group, columns)]);
    }
  }
}

CAKE_CPU_VECTORIZED
void unpack_input(const QuantizedRow& input, int32_t first_group, int32_t groups, int16_t* values,
                  float* scales) {
  unpack(input.packed + first_group * (kGroup / 2), groups, values);
  for (int32_t group = 0; group < groups; ++group) {
    scales[group] = e4m3_decode(input.sf[first_group + group]);
  }
}

}  // namespace

void block_dot(const WeightMatrix& weights, int32_t first_row, const QuantizedRow* inputs,
               int32_t num_inputs, double (*sums)[kBlockRows]) {
  alignas(64) int16_t weight_values[kBlockRows * kChunk];
  alignas(64) int16_t input_values[kChunk];
  float weight_scales[kBlockRows * kChunkGroups];
  float input_scales[kChunkGroups];

  std::fill_n(&sums[0][0], num_inputs * kBlockRows, 0.0);
  const int32_t columns = weights.columns / kGroup;
  for (int32_t first = 0; first < columns; first += kChunkGroups) {
    const int32_t groups = std::min(kChunkGroups, columns - first);
    unpack_weights(weights, first_row, first, groups, weight_values, weight_scales);
    for (int32_t i = 0; i < num_inputs; ++i) {
      unpack_input(inputs[i], first, groups, input_values, input_scales);
      chunk_dot(weight_values, weight_scales, input_values, input_scales, groups, sums[i]);
    }
  }
  // Both operands were doubled.
  for (int32_t i = 0; i < num_inputs; ++i) {
    for (int32_t row = 0; row < kBlockRows; ++row) {
      sums[i][row] *= 0.25;
    }
  }
}

}  // namespace cake::cpu
