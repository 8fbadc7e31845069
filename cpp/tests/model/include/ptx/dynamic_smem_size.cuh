// A special register that only the model reads.
#pragma once

#include <cstdint>

namespace cake::ptx {

// Bytes of this launch's dynamic shared memory.
__device__ __forceinline__ uint32_t dynamic_smem_size() {
  uint32_t bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}

}  // namespace cake::ptx
