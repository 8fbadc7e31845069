// The model's stores: see cpp/kernels/ptx/shared_memory.cuh. The tensor core reads them only after
// a proxy fence of the thread that stored.
#pragma once

#include <cstdint>

#include "tests/model/state.cuh"

namespace cake::ptx {

__device__ __forceinline__ void st_shared(uint32_t address, uint32_t word) {
  *static_cast<uint32_t*>(__cvta_shared_to_generic(address)) = word;
  model::ThreadState& self = model::this_thread();
  self.stored = true;
  model::state().stores[address / 4] = (threadIdx.x + 1) << 20 | (self.fences & 0xFFFFFu);
}

__device__ __forceinline__ void st_shared(uint32_t address, uint4 words) {
  const uint32_t all[4] = {words.x, words.y, words.z, words.w};
  for (int i = 0; i < 4; ++i) {
    st_shared(address + 4 * i, all[i]);
  }
}

}  // namespace cake::ptx
