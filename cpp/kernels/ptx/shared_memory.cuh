// Stores to shared memory by 32-bit shared address.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st
#pragma once

#include <cstdint>

namespace cake::ptx {

__device__ __forceinline__ void st_shared(uint32_t address, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

// 16 bytes at a multiple of 16.
__device__ __forceinline__ void st_shared(uint32_t address, uint4 words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words.x),
               "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}

}  // namespace cake::ptx
