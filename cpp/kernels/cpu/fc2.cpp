#include "common/layout.h"
#include "cpu/expert_blocks.h"
#include "nvtx.h"
#include "workspace.h"

namespace cake::cpu {

void fc2(const Fc2Arguments& a, const CpuExecutor& executor) {
  const nvtx::Range range("cake/fc2");
  const int32_t hidden = a.shape.hidden;
  const int32_t intermediate = a.shape.intermediate;
  const auto block_of = [&](int32_t expert, int32_t block, const int32_t* pairs, int32_t count) {
    QuantizedRow inputs[kBlockInputs];
    for (int32_t i = 0; i < count; ++i) {
      inputs[i] = quantized_row(a.intermediate, pairs[i], intermediate);
    }
    const WeightMatrix weights{a.w2 + int64_t{expert} * hidden * (intermediate / 2),
                               a.w2_sf + int64_t{expert} * hidden * (intermediate / kGroupSize),
                               intermediate};
    double sums[kBlockInputs][kBlockRows];
    block_dot(weights, a.first_row + block * kBlockRows, inputs, count, sums);

    const float alpha = a.fc2_alpha[expert];
    for (int32_t i = 0; i < count; ++i) {
      uint16_t* row = a.rows + int64_t{pairs[i]} * kFc2BlockRows + block * kBlockRows;
      for (int32_t n = 0; n < kBlockRows; ++n) {
        row[fc2_logical_row(n)] = float_to_bf16(rn::mul(static_cast<float>(sums[i][n]), alpha));
      }
    }
  };
  for_each_expert_block(executor, a.route, a.shape.num_experts, kFc2BlockRows / kBlockRows,
                        block_of);
}

}  // namespace cake::cpu
