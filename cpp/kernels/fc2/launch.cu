#include "fc2/decode_sm90.cuh"
#include "fc2/launch.h"
#include "fc2/prefill_sm90.cuh"
#include "kernel_launch.h"

namespace cake {

static_assert(fc2::Decode::kTilePairs == kDecodeTilePairs);
static_assert(grouped_mma::kTilePairs == kPrefillTilePairs);

Status load_fc2() {
  CAKE_RETURN_IF_ERROR(
      load_kernel("cake_fc2_decode_sm90", &fc2::cake_fc2_decode_sm90, sizeof(fc2::DecodeStorage)));
  return load_kernel("cake_fc2_prefill_sm90", &fc2::cake_fc2_prefill_sm90,
                     sizeof(fc2::PrefillStorage));
}

Status launch_fc2(const fc2::Params& params, const Plan& plan, void* stream) {
  LaunchConfig where;
  where.grid = dim3(static_cast<unsigned>(plan.num_ctas));
  where.stream = static_cast<cudaStream_t>(stream);
  if (plan.kernels == Kernels::kDecode) {
    where.block = dim3(fc2::Decode::kThreads);
    where.shared_bytes = sizeof(fc2::DecodeStorage);
    return launch("cake_fc2_decode_sm90", where, &fc2::cake_fc2_decode_sm90, params);
  }
  where.block = dim3(grouped_mma::kThreads);
  where.shared_bytes = sizeof(fc2::PrefillStorage);
  return launch("cake_fc2_prefill_sm90", where, &fc2::cake_fc2_prefill_sm90, params);
}

}  // namespace cake
