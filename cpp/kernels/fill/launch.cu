#include "fill/kernel.cuh"
#include "fill/launch.h"
#include "kernel_launch.h"

namespace cake {

Status launch_fill(float* destination, int32_t count, float value, void* stream) {
  LaunchConfig where;
  where.grid = dim3(static_cast<unsigned>((count + fill::kThreads - 1) / fill::kThreads));
  where.block = dim3(fill::kThreads);
  where.stream = static_cast<cudaStream_t>(stream);
  return launch("cake_fill", where, &fill::cake_fill, destination, count, value);
}

}  // namespace cake
