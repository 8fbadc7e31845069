#include "cpu/parallel.h"
#include "cpu/stages.h"
#include "workspace.h"

namespace cake::cpu {

void fused_moe(const Arguments& a) {
  const CpuExecutor& executor = a.executor != nullptr ? *a.executor : default_executor();
  const Workspace layout(a.shape, a.num_tokens);
  void* const workspace = a.workspace;

  auto* const input_packed = region_pointer<uint8_t>(workspace, layout.input_packed);
  auto* const input_sf = region_pointer<uint8_t>(workspace, layout.input_sf);
  auto* const expert_offsets = region_pointer<int32_t>(workspace, layout.expert_offsets);
  auto* const expert_pairs = region_pointer<int32_t>(workspace, layout.expert_pairs);
  auto* const fc1_packed = region_pointer<uint8_t>(workspace, layout.fc1_packed);
  auto* const fc1_sf = region_pointer<uint8_t>(workspace, layout.fc1_sf);
  auto* const fc2_rows = region_pointer<uint16_t>(workspace, layout.fc2_rows);
  const float* const prepared_beta = region_pointer<float>(workspace, layout.situ_beta);
  const float* const prepared_linear = region_pointer<float>(workspace, layout.situ_linear_beta);

  quantize({.input = a.input,
            .rows = a.num_tokens,
            .columns = a.shape.hidden,
            .input_stride = a.input_stride,
            .input_scale = a.input_scale,
            .packed = input_packed,
            .sf = input_sf},
           executor);
  route({.topk_ids = a.topk_ids,
         .topk_ids_type = a.topk_ids_type,
         .num_pairs = int64_t{a.num_tokens} * a.shape.top_k,
         .num_experts = a.shape.num_experts,
         .expert_offsets = expert_offsets,
         .expert_pairs = expert_pairs});
  const Route route{expert_offsets, expert_pairs};
  fc1({.shape = a.shape,
       .route = route,
       .input = {input_packed, input_sf},
       .w13 = static_cast<const uint8_t*>(a.w13),
       .w13_sf = static_cast<const uint8_t*>(a.w13_sf),
       .fc1_alpha = a.fc1_alpha,
       .fc2_input_scale = a.fc2_input_scale,
       .situ_beta = a.situ_beta != nullptr ? a.situ_beta : prepared_beta,
       .situ_linear_beta = a.situ_linear_beta != nullptr ? a.situ_linear_beta : prepared_linear,
       .packed = fc1_packed,
       .sf = fc1_sf},
      executor);
  for (int32_t first_row = 0; first_row < a.shape.hidden; first_row += kFc2BlockRows) {
    fc2({.shape = a.shape,
         .route = route,
         .intermediate = {fc1_packed, fc1_sf},
         .w2 = static_cast<const uint8_t*>(a.w2),
         .w2_sf = static_cast<const uint8_t*>(a.w2_sf),
         .fc2_alpha = a.fc2_alpha,
         .first_row = first_row,
         .rows = fc2_rows},
        executor);
    finalize({.shape = a.shape,
              .num_tokens = a.num_tokens,
              .topk_ids = a.topk_ids,
              .topk_ids_type = a.topk_ids_type,
              .topk_weights = a.topk_weights,
              .topk_weights_type = a.topk_weights_type,
              .first_row = first_row,
              .rows = fc2_rows,
              .output = static_cast<uint16_t*>(a.output)},
             executor);
  }
}

}  // namespace cake::cpu
