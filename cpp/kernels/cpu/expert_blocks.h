// The loop that FC1 and FC2 share: 32-row blocks of every expert's weights, and the expert's pairs.
#pragma once

#include <algorithm>

#include "common/nvfp4.h"
#include "cpu/block_dot.h"
#include "cpu/parallel.h"
#include "cpu/stages.h"

namespace cake::cpu {

// Calls function(expert, block, pairs, num_pairs) in parallel for every expert with pairs, every
// block in [0, num_blocks) and every run of at most kBlockInputs pairs.
template <class Function>
void for_each_expert_block(const CpuExecutor& executor, const Route& route, int32_t num_experts,
                           int32_t num_blocks, const Function& function) {
  for_each_item(executor, int64_t{num_experts} * num_blocks, [&](int64_t item) {
    const auto expert = static_cast<int32_t>(item / num_blocks);
    const auto block = static_cast<int32_t>(item % num_blocks);
    const int32_t end = route.expert_offsets[expert + 1];
    for (int32_t first = route.expert_offsets[expert]; first < end; first += kBlockInputs) {
      function(expert, block, route.expert_pairs + first, std::min(kBlockInputs, end - first));
    }
  });
}

inline QuantizedRow quantized_row(const QuantizedRows& rows, int64_t row, int32_t columns) {
  return {rows.packed + row * (columns / 2), rows.sf + row * (columns / kGroupSize)};
}

}  // namespace cake::cpu
