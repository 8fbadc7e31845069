// The model's barrier instructions: see cpp/kernels/ptx/barrier.cuh.
#pragma once

#include <cstdint>

#include "tests/model/native.cuh"
#include "tests/model/state.cuh"

namespace cake::ptx {

__device__ __forceinline__ void bar_sync(int32_t id, int32_t threads,
                                         model::Location where = model::Location::current()) {
  model::check(id >= 1 && id <= 14, model::Error::kBarrier, where, id);
  native_ptx::bar_sync(id, threads);
  model::this_thread().waited = true;
}

__device__ __forceinline__ void fence_proxy_async() {
  native_ptx::fence_proxy_async();
  model::ThreadState& self = model::this_thread();
  self.stored = false;
  model::store_volatile(self.fences, self.fences + 1);
}

}  // namespace cake::ptx
