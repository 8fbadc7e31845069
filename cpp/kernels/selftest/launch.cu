#include "kernel_launch.h"
#include "selftest/kernel.cuh"
#include "selftest/launch.h"

namespace cake::selftest {

Status launch_selftest(int32_t* out, int64_t count, void* stream) {
  LaunchConfig where;
  where.grid = dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads));
  where.block = dim3(kThreads);
  where.stream = static_cast<cudaStream_t>(stream);
  return launch("cake_selftest", where, &cake_selftest, out, count);
}

}  // namespace cake::selftest
