// What every CTA does with tensor memory as a whole, sm_100.
#pragma once

#include <cstdint>

#include "common/tcgen05_layout.h"
#include "ptx/barrier.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"

namespace cake {

// One warp takes all columns; their address goes to `address` in shared memory.
__device__ __forceinline__ void allocate_tensor_memory(uint32_t& address) {
  ptx::tcgen05_alloc<tcgen05::kColumns>(ptx::shared_address(&address));
  ptx::tcgen05_relinquish_alloc_permit();
}

// The CTA's threads meet by barrier 1, and may rely on what others did with tensor memory before.
__device__ __forceinline__ void sync_tensor_memory(uint32_t num_threads) {
  __syncwarp();
  ptx::tcgen05_fence_before_thread_sync();
  ptx::bar_sync(1, num_threads);
  ptx::tcgen05_fence_after_thread_sync();
}

}  // namespace cake
