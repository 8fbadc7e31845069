// The model's bulk copies: see cpp/kernels/ptx/bulk_copy.cuh. Their destination holds NaNs until
// they land.
#pragma once

#include <cstdint>

#include "tests/model/native.cuh"
#include "tests/model/queue.cuh"

namespace cake::ptx {

using native_ptx::createpolicy_evict_first;
using native_ptx::createpolicy_evict_normal;

__device__ __forceinline__ void cp_async_bulk(uint32_t destination, const void* source,
                                              uint32_t bytes, uint32_t barrier, uint64_t policy,
                                              model::Location where = model::Location::current()) {
  model::poison_copy(destination, bytes, where);
  native_ptx::fence_proxy_async();
  native_ptx::cp_async_bulk(destination, source, bytes, barrier, policy);
}

}  // namespace cake::ptx
