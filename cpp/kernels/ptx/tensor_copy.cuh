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

}  // namespace cake::ptx
