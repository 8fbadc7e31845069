#include "fc2/decode_sm90.cuh"
#include "fc2/launch.h"
#include "kernel_launch.h"

namespace cake {

Status load_fc2() {
  return load_kernel("cake_fc2_decode_sm90", &fc2::cake_fc2_decode_sm90,
                     sizeof(fc2::DecodeStorage));
}

Status launch_fc2(const fc2::Params& params, int32_t num_ctas, void* stream) {
  LaunchConfig where;
  where.grid = dim3(static_cast<unsigned>(num_ctas));
  where.block = dim3(fc2::Decode::kThreads);
  where.shared_bytes = sizeof(fc2::DecodeStorage);
  where.stream = static_cast<cudaStream_t>(stream);
  return launch("cake_fc2_decode_sm90", where, &fc2::cake_fc2_decode_sm90, params);
}

}  // namespace cake
