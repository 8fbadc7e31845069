// Named barriers and proxy fences of a CTA.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar
#pragma once

#include <cstdint>

namespace cake::ptx {

// Waits until `threads` threads (whole warps) have come to barrier `id`, 1 to 15.
__device__ __forceinline__ void bar_sync(int32_t id, int32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Makes this thread's writes to shared memory visible to wgmma and bulk copies.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace cake::ptx
