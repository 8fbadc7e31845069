#include <algorithm>

#include "cpu/ids.h"
#include "cpu/stages.h"
#include "nvtx.h"

namespace cake::cpu {

void route(const RouteArguments& a) {
  const nvtx::Range range("cake/route");
  // Counts, shifted by one so that the prefix sum turns them into offsets in place.
  std::fill_n(a.expert_offsets, a.num_experts + 1, 0);
  for (int64_t pair = 0; pair < a.num_pairs; ++pair) {
    const int32_t expert = expert_of(a.topk_ids, a.topk_ids_type, pair, a.num_experts);
    if (expert != kEmptySlot) {
      ++a.expert_offsets[expert + 1];
    }
  }
  for (int32_t expert = 0; expert < a.num_experts; ++expert) {
    a.expert_offsets[expert + 1] += a.expert_offsets[expert];
  }
  // Scatter in pair order: stable by token, then slot. offsets[e] runs ahead to offsets[e + 1].
  for (int64_t pair = 0; pair < a.num_pairs; ++pair) {
    const int32_t expert = expert_of(a.topk_ids, a.topk_ids_type, pair, a.num_experts);
    if (expert != kEmptySlot) {
      a.expert_pairs[a.expert_offsets[expert]++] = static_cast<int32_t>(pair);
    }
  }
  std::copy_backward(a.expert_offsets, a.expert_offsets + a.num_experts,
                     a.expert_offsets + a.num_experts + 1);
  a.expert_offsets[0] = 0;
}

}  // namespace cake::cpu
