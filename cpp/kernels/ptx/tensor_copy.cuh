// Asynchronous copy of a box of a tensor, global to shared memory (TMA).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
#pragma once

#include <cuda.h>

#include <cstdint>

namespace cake::ptx {

// The box whose first element is (x, y), x in the contiguous dimension; completion counts its bytes
// on `barrier`.
__device__ __forceinline__ void cp_async_bulk_tensor_2d(uint32_t destination,
                                                        const CUtensorMap& map, int32_t x,
                                                        int32_t y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(destination),
      "l"(&map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

// The same with an L2 policy.
__device__ __forceinline__ void cp_async_bulk_tensor_2d(uint32_t destination,
                                                        const CUtensorMap& map, int32_t x,
                                                        int32_t y, uint32_t barrier,
                                                        uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
      "l"(&map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
      : "memory");
}

// Four boxes of one row, rows y0 .. y3, one after the other; sm_100a and sm_103a. A row beyond the
// tensor gives zeros, and its bytes count.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_gather4(uint32_t destination,
                                                                const CUtensorMap& map, int32_t x,
                                                                int32_t y0, int32_t y1, int32_t y2,
                                                                int32_t y3, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(destination),
      "l"(&map), "r"(x), "r"(y0), "r"(y1), "r"(y2), "r"(y3), "r"(barrier)
      : "memory");
}

// Fetches the map itself, before the first copy needs it.
__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

}  // namespace cake::ptx
