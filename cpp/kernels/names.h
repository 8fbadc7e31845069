// Argument names in error messages: the Python name first, the op's in parentheses where it
// differs.
#pragma once

namespace cake::names {

inline constexpr char kInput[] = "input";
inline constexpr char kTopkIds[] = "token_selected_experts (topk_ids)";
inline constexpr char kTopkWeights[] = "token_final_scales (topk_weights)";
inline constexpr char kW13[] = "fc1_expert_weights (w13)";
inline constexpr char kW2[] = "fc2_expert_weights (w2)";
inline constexpr char kInputScale[] = "quant_scales[0] (input_scale)";
inline constexpr char kW13Sf[] = "quant_scales[1] (w13_sf)";
inline constexpr char kFc1Alpha[] = "quant_scales[2] (fc1_alpha)";
inline constexpr char kFc2InputScale[] = "quant_scales[3] (fc2_input_scale)";
inline constexpr char kW2Sf[] = "quant_scales[4] (w2_sf)";
inline constexpr char kFc2Alpha[] = "quant_scales[5] (fc2_alpha)";
inline constexpr char kSituBeta[] = "situ_beta";
inline constexpr char kSituLinearBeta[] = "situ_linear_beta";
inline constexpr char kOutput[] = "output";
inline constexpr char kWorkspace[] = "workspace_buffer";

}  // namespace cake::names
