#include <algorithm>

#include "common/nvfp4.h"
#include "cpu/parallel.h"
#include "cpu/stages.h"
#include "cpu/vectorized.h"
#include "nvtx.h"

namespace cake::cpu {
namespace {

constexpr uint16_t kInfBits = 0x7F80;  // bf16 magnitudes above it are NaN
constexpr uint16_t kNaNBits = 0x7FFF;

// Largest magnitude of a group as bf16 bits; NaN counts only when there is nothing else.
inline uint16_t group_amax(const uint16_t* input) {
  uint16_t amax = 0;
  uint16_t least = kNaNBits;
  for (int32_t i = 0; i < kGroupSize; ++i) {
    const uint16_t magnitude = input[i] & 0x7FFF;
    amax = std::max<uint16_t>(amax, magnitude > kInfBits ? 0 : magnitude);
    least = std::min(least, magnitude);
  }
  return least > kInfBits ? kNaNBits : amax;
}

CAKE_CPU_VECTORIZED
void quantize_row(const uint16_t* input, float q, int64_t groups, uint8_t* packed, uint8_t* sf) {
  for (int64_t group = 0; group < groups; ++group) {
    const uint16_t* values = input + group * kGroupSize;
    const BlockScale scale = block_scale_precise(bf16_to_float(group_amax(values)), q);
    sf[group] = scale.sf;
    uint8_t codes[kGroupSize];
    for (int32_t i = 0; i < kGroupSize; ++i) {
      codes[i] = static_cast<uint8_t>(encode_precise(bf16_to_float(values[i]), scale));
    }
    for (int32_t i = 0; i < kGroupSize / 2; ++i) {
      packed[group * (kGroupSize / 2) + i] =
          static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
    }
  }
}

}  // namespace

void quantize(const QuantizeArguments& a, const CpuExecutor& executor) {
  const nvtx::Range range("cake/quantize");
  const float q = *a.input_scale;
  const int64_t groups = a.columns / kGroupSize;
  constexpr int64_t kRowsPerItem = 8;
  for_each_item(executor, (a.rows + kRowsPerItem - 1) / kRowsPerItem, [&](int64_t item) {
    const int64_t end = std::min(a.rows, (item + 1) * kRowsPerItem);
    for (int64_t row = item * kRowsPerItem; row < end; ++row) {
      quantize_row(static_cast<const uint16_t*>(a.input) + row * a.input_stride, q, groups,
                   static_cast<uint8_t*>(a.packed) + row * a.columns / 2,
                   static_cast<uint8_t*>(a.sf) + row * groups);
    }
  });
}

}  // namespace cake::cpu
