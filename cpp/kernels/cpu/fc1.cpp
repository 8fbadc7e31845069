#include "common/layout.h"
#include "common/situ.h"
#include "cpu/expert_blocks.h"
#include "nvtx.h"

namespace cake::cpu {
namespace {

// Quantizes the 16 features of one block, recipe Q'.
void requantize(const float* activation, float q, uint8_t* packed, uint8_t* sf) {
  float amax = max_magnitude(activation[0], activation[0]);
  for (int32_t i = 1; i < kGroupSize; ++i) {
    amax = max_magnitude(amax, activation[i]);
  }
  const BlockScale scale = block_scale_intermediate(amax, q);
  *sf = scale.sf;
  for (int32_t i = 0; i < kGroupSize / 2; ++i) {
    packed[i] = static_cast<uint8_t>(encode_intermediate(activation[2 * i], scale, q) |
                                     encode_intermediate(activation[2 * i + 1], scale, q) << 4);
  }
}

}  // namespace

void fc1(const Fc1Arguments& a, const CpuExecutor& executor) {
  const nvtx::Range range("cake/fc1");
  const int32_t hidden = a.shape.hidden;
  const int32_t intermediate = a.shape.intermediate;
  const int64_t rows = 2 * int64_t{intermediate};
  // A block of 32 prepared rows holds up and gate of 16 features: one group of the intermediate.
  const auto block_of = [&](int32_t expert, int32_t block, const int32_t* pairs, int32_t count) {
    QuantizedRow inputs[kBlockInputs];
    for (int32_t i = 0; i < count; ++i) {
      inputs[i] = quantized_row(a.input, pairs[i] / a.shape.top_k, hidden);
    }
    const WeightMatrix weights{a.w13 + expert * rows * (hidden / 2),
                               a.w13_sf + expert * rows * (hidden / kGroupSize), hidden};
    double sums[kBlockInputs][kBlockRows];
    block_dot(weights, block * kBlockRows, inputs, count, sums);

    const float alpha = a.fc1_alpha[expert];
    for (int32_t i = 0; i < count; ++i) {
      float activation[kGroupSize];
      for (int32_t feature = 0; feature < kGroupSize; ++feature) {
        const float up = static_cast<float>(sums[i][fc1_prepared_row(0, feature)]);
        const float gate = static_cast<float>(sums[i][fc1_prepared_row(1, feature)]);
        activation[feature] = situ(rn::mul(alpha, gate), rn::mul(alpha, up), a.situ_beta[expert],
                                   a.situ_linear_beta[expert]);
      }
      const int64_t group = int64_t{pairs[i]} * (intermediate / kGroupSize) + block;
      requantize(activation, a.fc2_input_scale[expert], a.packed + group * (kGroupSize / 2),
                 a.sf + group);
      if (a.activation != nullptr) {
        std::copy_n(activation, kGroupSize, a.activation + group * kGroupSize);
      }
    }
  };
  for_each_expert_block(executor, a.route, a.shape.num_experts, intermediate / kGroupSize,
                        block_of);
}

}  // namespace cake::cpu
