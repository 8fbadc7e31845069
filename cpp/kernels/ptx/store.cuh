// Stores to global memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st
#pragma once

#include <cstdint>

namespace cake::ptx {

// A predicated store, where the compiler would branch. Not ordered with other accesses: nothing in
// the kernel may read or write the same word.
__device__ __forceinline__ void st_global_if(bool condition, void* pointer, uint32_t value) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %0, 0;\n"
      "@p st.global.b32 [%1], %2;\n"
      "}" ::"r"(static_cast<int32_t>(condition)),
      "l"(__cvta_generic_to_global(pointer)), "r"(value));
}

}  // namespace cake::ptx
