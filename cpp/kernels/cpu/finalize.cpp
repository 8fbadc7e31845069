#include <algorithm>
#include <cmath>

#include "common/nvfp4.h"
#include "cpu/ids.h"
#include "cpu/parallel.h"
#include "cpu/stages.h"
#include "cpu/vectorized.h"
#include "nvtx.h"
#include "workspace.h"

namespace cake::cpu {
namespace {

// A routing weight as the op sees it: bfloat16, widened.
float weight_of(const void* topk_weights, WeightType type, int64_t pair) {
  return bf16_to_float(type == WeightType::kFloat32
                           ? float_to_bf16(static_cast<const float*>(topk_weights)[pair])
                           : static_cast<const uint16_t*>(topk_weights)[pair]);
}

CAKE_CPU_VECTORIZED
void add_row(float weight, const uint16_t* row, float* sums) {
  for (int32_t i = 0; i < kFc2BlockRows; ++i) {
    sums[i] = std::fma(weight, bf16_to_float(row[i]), sums[i]);
  }
}

}  // namespace

void finalize(const FinalizeArguments& a, const CpuExecutor& executor) {
  const nvtx::Range range("cake/finalize");
  for_each_item(executor, a.num_tokens, [&](int64_t token) {
    float sums[kFc2BlockRows] = {};
    for (int32_t slot = 0; slot < a.shape.top_k; ++slot) {
      const int64_t pair = token * a.shape.top_k + slot;
      if (expert_of(a.topk_ids, a.topk_ids_type, pair, a.shape.num_experts) == kEmptySlot) {
        continue;
      }
      add_row(weight_of(a.topk_weights, a.topk_weights_type, pair), a.rows + pair * kFc2BlockRows,
              sums);
    }
    uint16_t* output = a.output + token * a.shape.hidden + a.first_row;
    std::transform(sums, sums + kFc2BlockRows, output, float_to_bf16);
  });
}

}  // namespace cake::cpu
