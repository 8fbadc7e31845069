// Special registers, read anew at every call: the compiler knows nothing of their values.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers
#pragma once

#include <cstdint>

namespace cake::ptx {

__device__ __forceinline__ uint32_t tid_x() {
  uint32_t value;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(value));
  return value;
}

__device__ __forceinline__ uint32_t ctaid_z() {
  uint32_t value;
  asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(value));
  return value;
}

// Bytes of the launch's dynamic shared memory.
__device__ __forceinline__ uint32_t dynamic_smem_size() {
  uint32_t value;
  asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(value));
  return value;
}

}  // namespace cake::ptx
