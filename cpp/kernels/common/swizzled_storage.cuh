// Shared memory that the 128-byte swizzle applies to.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"

namespace cake {

// A kernel's dynamic shared memory as its storage, at an address that the swizzle can count on.
template <class Storage>
__device__ __forceinline__ Storage& swizzled_storage(uint8_t* memory) {
  if (ptx::shared_address(memory) % 1024 != 0) {
    __trap();
  }
  return *reinterpret_cast<Storage*>(memory);
}

}  // namespace cake
