#include "decode/kernel_sm90.cuh"
#include "decode/launch.h"
#include "kernel_launch.h"
#include "nvtx.h"

namespace cake {

static_assert(decode::Fc1::kTilePairs == kDecodeTilePairs);
static_assert(decode::Fc2::kTilePairs == kDecodeTilePairs);
static_assert(decode::Token::kCtas == kFinalizingCtas);

Status load_decode() {
  CAKE_RETURN_IF_ERROR(load_kernel("cake_decode_sm90", &decode::cake_decode_sm90<true>,
                                   sizeof(decode::Storage), decode::kLaunchRegisters));
  return load_kernel("cake_decode_sm90", &decode::cake_decode_sm90<false>, sizeof(decode::Storage),
                     decode::kLaunchRegisters);
}

Status launch_decode(const decode::Params& params, const Plan& plan, void* stream) {
  const nvtx::Range range("cake/decode");
  LaunchConfig where;
  where.grid = dim3(static_cast<unsigned>(plan.num_ctas));
  where.block = dim3(decode::kThreads);
  where.shared_bytes = sizeof(decode::Storage);
  where.stream = static_cast<cudaStream_t>(stream);
  return launch(
      "cake_decode_sm90", where,
      plan.fc2_finalizes ? &decode::cake_decode_sm90<true> : &decode::cake_decode_sm90<false>,
      params);
}

}  // namespace cake
