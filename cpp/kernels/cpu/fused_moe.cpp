#include "cpu/parallel.h"
#include "cpu/stages.h"
#include "workspace.h"

namespace cake::cpu {

void fused_moe(const Arguments& a) {
  const CpuExecutor& executor = a.executor != nullptr ? *a.executor : default_executor();
  const WorkspacePointers w(a.workspace, Workspace(a.shape, a.num_tokens));

  quantize({.input = a.input,
            .rows = a.num_tokens,
            .columns = a.shape.hidden,
            .input_stride = a.input_stride,
            .input_scale = a.input_scale,
            .packed = w.input_packed,
            .sf = w.input_sf},
           executor);
  route({.topk_ids = a.topk_ids,
         .topk_ids_type = a.topk_ids_type,
         .num_pairs = int64_t{a.num_tokens} * a.shape.top_k,
         .num_experts = a.shape.num_experts,
         .expert_offsets = w.expert_offsets,
         .expert_pairs = w.expert_pairs});
  const Route route{w.expert_offsets, w.expert_pairs};
  fc1({.shape = a.shape,
       .route = route,
       .input = {w.input_packed, w.input_sf},
       .w13 = static_cast<const uint8_t*>(a.w13),
       .w13_sf = static_cast<const uint8_t*>(a.w13_sf),
       .fc1_alpha = a.fc1_alpha,
       .fc2_input_scale = a.fc2_input_scale,
       .situ_beta = a.situ_beta != nullptr ? a.situ_beta : w.situ_beta,
       .situ_linear_beta = a.situ_linear_beta != nullptr ? a.situ_linear_beta : w.situ_linear_beta,
       .packed = w.fc1_packed,
       .sf = w.fc1_sf},
      executor);
  for (int32_t first_row = 0; first_row < a.shape.hidden; first_row += kFc2BlockRows) {
    fc2({.shape = a.shape,
         .route = route,
         .intermediate = {w.fc1_packed, w.fc1_sf},
         .w2 = static_cast<const uint8_t*>(a.w2),
         .w2_sf = static_cast<const uint8_t*>(a.w2_sf),
         .fc2_alpha = a.fc2_alpha,
         .first_row = first_row,
         .rows = w.fc2_rows},
        executor);
    finalize({.shape = a.shape,
              .num_tokens = a.num_tokens,
              .topk_ids = a.topk_ids,
              .topk_ids_type = a.topk_ids_type,
              .topk_weights = a.topk_weights,
              .topk_weights_type = a.topk_weights_type,
              .first_row = first_row,
              .rows = w.fc2_rows,
              .output = static_cast<uint16_t*>(a.output)},
             executor);
  }
}

}  // namespace cake::cpu
