// Sets floats on the device.
#pragma once

#include <cstdint>

#include "ptx/pdl.cuh"

namespace cake::fill {

inline constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    cake_fill(float* __restrict__ destination, int32_t count, float value) {
  ptx::griddepcontrol_wait();
  const auto i = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (i < count) {
    destination[i] = value;
  }
}

}  // namespace cake::fill
