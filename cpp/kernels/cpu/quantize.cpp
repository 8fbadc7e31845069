#include "common/nvfp4.h"
#include "cpu/parallel.h"
#include "cpu/stages.h"

namespace cake::cpu {

void quantize(const QuantizeArguments& a, const CpuExecutor& executor) {
  const float q = *a.input_scale;
  const int64_t groups = a.columns / kGroupSize;
  constexpr int64_t kRowsPerItem = 8;
  for_each_item(executor, (a.rows + kRowsPerItem - 1) / kRowsPerItem, [&](int64_t item) {
    const int64_t end = std::min(a.rows, (item + 1) * kRowsPerItem);
    for (int64_t row = item * kRowsPerItem; row < end; ++row) {
      const auto* input = static_cast<const uint16_t*>(a.input) + row * a.input_stride;
      auto* packed = static_cast<uint8_t*>(a.packed) + row * a.columns / 2;
      auto* sf = static_cast<uint8_t*>(a.sf) + row * groups;
      for (int64_t group = 0; group < groups; ++group) {
        float values[kGroupSize];
        for (int32_t i = 0; i < kGroupSize; ++i) {
          values[i] = bf16_to_float(input[group * kGroupSize + i]);
        }
        float amax = max_magnitude(values[0], values[0]);
        for (int32_t i = 1; i < kGroupSize; ++i) {
          amax = max_magnitude(amax, values[i]);
        }
        const BlockScale scale = block_scale_precise(amax, q);
        sf[group] = scale.sf;
        for (int32_t i = 0; i < kGroupSize / 2; ++i) {
          packed[group * (kGroupSize / 2) + i] = static_cast<uint8_t>(
              encode_precise(values[2 * i], scale) | encode_precise(values[2 * i + 1], scale) << 4);
        }
      }
    }
  });
}

}  // namespace cake::cpu
