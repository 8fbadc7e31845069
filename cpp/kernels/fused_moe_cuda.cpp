// One call on a GPU: launches in order, each depending on the one before by programmatic dependent
// launch. Grids follow from the token count and the number of SMs alone.
//
//   route + quantize -> fc1 (SiTU, requantize)
//   -> for each part of the output columns: fc2 -> finalize
//
// The decode kernel is fc1 and fc2 in one launch, for one token (Plan::fc2_finalizes) finalize as
// well.
#include <cuda_runtime.h>

#include <algorithm>

#include "decode/launch.h"
#include "device.h"
#include "fc1/launch.h"
#include "fc2/launch.h"
#include "fill/launch.h"
#include "finalize/launch.h"
#include "kernel_launch.h"
#include "plan.h"
#include "routing/launch.h"
#include "workspace.h"

namespace cake::device {
namespace {

constexpr Shape kShape = kKimiK3;

Status check_not_capturing(void* stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  CAKE_RETURN_IF_ERROR(cuda_status(
      cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture), "cudaStreamIsCapturing"));
  if (capture != cudaStreamCaptureStatusNone) {
    return error(StatusCode::kRuntimeError,
                 "workspace_buffer: cannot be prepared while the stream is capturing a CUDA graph; "
                 "prepare it before the capture");
  }
  return {};
}

Status find_gpu(int32_t index, Gpu* gpu) {
  int32_t major = 0;
  int32_t minor = 0;
  CAKE_RETURN_IF_ERROR(compute_capability(index, &major, &minor));
  gpu->architecture = major >= 10 ? Architecture::kSm100 : Architecture::kSm90;
  return multiprocessor_count(index, &gpu->num_sms);
}

}  // namespace

Status prepare(void* workspace, int32_t num_tokens, void* stream) {
  CAKE_RETURN_IF_ERROR(check_not_capturing(stream));
  int32_t index = 0;
  CAKE_RETURN_IF_ERROR(cuda_status(cudaGetDevice(&index), "cudaGetDevice"));
  Gpu gpu{};
  CAKE_RETURN_IF_ERROR(find_gpu(index, &gpu));
  CAKE_RETURN_IF_ERROR(load_route_quantize());
  if (gpu.architecture == Architecture::kSm90) {
    CAKE_RETURN_IF_ERROR(load_decode());
  }
  CAKE_RETURN_IF_ERROR(load_fc1(gpu.architecture));
  CAKE_RETURN_IF_ERROR(load_fc2(gpu.architecture));
  CAKE_RETURN_IF_ERROR(load_finalize());
  const WorkspacePointers w(workspace, Workspace(kShape, num_tokens));
  CAKE_RETURN_IF_ERROR(launch_fill(w.situ_beta, kShape.num_experts, kDefaultSituBeta, stream));
  return launch_fill(w.situ_linear_beta, kShape.num_experts, kDefaultSituLinearBeta, stream);
}

Status fused_moe(const Arguments& a) {
  Gpu gpu{};
  CAKE_RETURN_IF_ERROR(find_gpu(a.device.index, &gpu));
  const Plan plan =
      make_plan(a.num_tokens, gpu, a.batch_invariant || batch_invariant_by_environment());
  const WorkspacePointers w(a.workspace, Workspace(kShape, a.num_tokens));
  const Slots slots{.topk_ids = a.topk_ids,
                    .topk_weights = a.topk_weights,
                    .ids_are_int64 = a.topk_ids_type == IdType::kInt64,
                    .weights_are_float32 = a.topk_weights_type == WeightType::kFloat32,
                    .num_experts = kShape.num_experts};
  // The prefill kernels' input as half lies where FC2's rows come later: FC1 has read it by then.
  uint8_t* const halves =
      plan.kernels == Kernels::kPrefill ? reinterpret_cast<uint8_t*>(w.fc2_rows) : nullptr;

  CAKE_RETURN_IF_ERROR(launch_route_quantize({.topk_ids = a.topk_ids,
                                              .topk_ids_type = a.topk_ids_type,
                                              .num_tokens = a.num_tokens,
                                              .tile_pairs = plan.tile_pairs,
                                              .expert_pairs = w.expert_pairs,
                                              .tiles = w.tiles,
                                              .num_tiles = w.num_tiles,
                                              .work_counter = w.work_counter,
                                              .range_counters = w.range_counters,
                                              .input = a.input,
                                              .input_stride = a.input_stride,
                                              .input_scale = a.input_scale,
                                              .packed = w.input_packed,
                                              .sf = w.input_sf,
                                              .halves = halves,
                                              .num_sms = gpu.num_sms,
                                              .stream = a.stream}));
  const fc1::Params fc1{
      .w13 = static_cast<const uint8_t*>(a.w13),
      .w13_sf = static_cast<const uint8_t*>(a.w13_sf),
      .input = w.input_packed,
      .input_sf = w.input_sf,
      .halves = halves,
      .tiles = w.tiles,
      .num_tiles = w.num_tiles,
      .expert_pairs = w.expert_pairs,
      .fc1_alpha = a.fc1_alpha,
      .fc2_input_scale = a.fc2_input_scale,
      .situ_beta = a.situ_beta != nullptr ? a.situ_beta : w.situ_beta,
      .situ_linear_beta = a.situ_linear_beta != nullptr ? a.situ_linear_beta : w.situ_linear_beta,
      .packed = w.fc1_packed,
      .sf = w.fc1_sf,
      .num_tokens = a.num_tokens};
  fc2::Params fc2{.w2 = static_cast<const uint8_t*>(a.w2),
                  .w2_sf = static_cast<const uint8_t*>(a.w2_sf),
                  .input = w.fc1_packed,
                  .input_sf = w.fc1_sf,
                  .tiles = w.tiles,
                  .num_tiles = w.num_tiles,
                  .expert_pairs = w.expert_pairs,
                  .fc2_alpha = a.fc2_alpha,
                  .rows = w.fc2_rows,
                  .num_pairs = a.num_tokens * kShape.top_k,
                  .tile_parts = plan.fc2_tile_parts,
                  .pool = plan.fc2_pool,
                  .work_counter = w.work_counter,
                  .slots = slots,
                  .output = static_cast<uint16_t*>(a.output)};
  const bool one_launch = plan.kernels == Kernels::kDecode;  // FC1 and FC2
  if (!one_launch) {
    CAKE_RETURN_IF_ERROR(launch_fc1(fc1, plan, a.stream));
  }
  const int32_t all_blocks = kShape.hidden / kFc2BlockRows;
  for (int32_t first = 0; first < all_blocks; first += plan.fc2_blocks) {
    fc2.first_block = first;
    fc2.num_blocks = std::min(plan.fc2_blocks, all_blocks - first);
    CAKE_RETURN_IF_ERROR(
        one_launch
            ? launch_decode({.fc1 = fc1, .fc2 = fc2, .ranges = w.range_counters}, plan, a.stream)
            : launch_fc2(fc2, plan, a.stream));
    if (!plan.fc2_finalizes) {
      CAKE_RETURN_IF_ERROR(
          launch_finalize({.slots = slots,
                           .num_tokens = a.num_tokens,
                           .rows = w.fc2_rows,
                           .columns = fc2.num_blocks * kFc2BlockRows,
                           .output = static_cast<uint16_t*>(a.output) + first * kFc2BlockRows,
                           .stream = a.stream}));
    }
  }
  return {};
}

}  // namespace cake::device
