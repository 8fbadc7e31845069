// The model's mbarrier instructions: see cpp/kernels/ptx/mbarrier.cuh. Waits give up after a while.
#pragma once

#include <cuda_awbarrier_primitives.h>

#include <cstdint>

#include "tests/model/native.cuh"
#include "tests/model/state.cuh"

namespace cake::model {

// What an arrival publishes must be fenced in the whole warp, for which one lane may arrive.
__device__ __noinline__ inline void check_arrival(Location where) {
  const uint32_t first = threadIdx.x / 32 * 32;
  bool loaded = false, flying = false, stored = false;
  for (uint32_t i = first; i < first + 32; ++i) {
    const ThreadState& thread = state().threads[i];
    loaded |= load_volatile(thread.loaded);
    flying |= load_volatile(thread.load_flying);
    stored |= load_volatile(thread.stored);
  }
  check(!loaded, Error::kFenceBefore, where);
  check(!flying, Error::kLoadWait, where);
  check(!stored, Error::kProxyFence, where);
}

}  // namespace cake::model

namespace cake::ptx {

using native_ptx::fence_mbarrier_init;
using native_ptx::mbarrier_init;
using native_ptx::shared_address;

__device__ __forceinline__ void mbarrier_arrive_expect_tx(
    uint32_t barrier, uint32_t bytes, model::Location where = model::Location::current()) {
  model::check_arrival(where);
  native_ptx::mbarrier_arrive_expect_tx(barrier, bytes);
}

__device__ __forceinline__ void mbarrier_arrive(
    uint32_t barrier, model::Location where = model::Location::current()) {
  model::check_arrival(where);
  native_ptx::mbarrier_arrive(barrier);
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity,
                                              model::Location where = model::Location::current()) {
  constexpr uint32_t kNap = 1000;  // nanoseconds
  auto* const object = static_cast<__mbarrier_t*>(__cvta_shared_to_generic(barrier));
  for (const int64_t since = clock64(); !__mbarrier_try_wait_parity(object, parity != 0, kNap);) {
    if (clock64() - since > model::kPatience) {
      model::time_out(where, barrier);
    }
  }
  model::this_thread().waited = true;
}

}  // namespace cake::ptx
