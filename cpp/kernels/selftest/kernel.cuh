// Names the cubin that runs: out[i] = 1000 * compute capability + i % 1000.
#pragma once

#include <cstdint>

#include "ptx/pdl.cuh"

namespace cake::selftest {

inline constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    cake_selftest(int32_t* __restrict__ out, int64_t count) {
#ifdef __CUDA_ARCH__
  constexpr int32_t kCapability = __CUDA_ARCH__ / 10;
#else
  constexpr int32_t kCapability = 0;
#endif
  ptx::griddepcontrol_wait();
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i < count) {
    out[i] = 1000 * kCapability + static_cast<int32_t>(i % 1000);
  }
}

}  // namespace cake::selftest
