// Stores to shared memory by 32-bit shared address.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st
#pragma once

#include <cstdint>

namespace cake::ptx {

__device__ __forceinline__ void st_shared(uint32_t address, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

}  // namespace cake::ptx
