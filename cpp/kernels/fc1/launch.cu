#include "fc1/decode_sm90.cuh"
#include "fc1/launch.h"
#include "kernel_launch.h"

namespace cake {

Status load_fc1() {
  return load_kernel("cake_fc1_decode_sm90", &fc1::cake_fc1_decode_sm90,
                     sizeof(fc1::DecodeStorage));
}

Status launch_fc1(const fc1::Params& params, int32_t num_ctas, void* stream) {
  LaunchConfig where;
  where.grid = dim3(static_cast<unsigned>(num_ctas));
  where.block = dim3(fc1::Decode::kThreads);
  where.shared_bytes = sizeof(fc1::DecodeStorage);
  where.stream = static_cast<cudaStream_t>(stream);
  return launch("cake_fc1_decode_sm90", where, &fc1::cake_fc1_decode_sm90, params);
}

}  // namespace cake
