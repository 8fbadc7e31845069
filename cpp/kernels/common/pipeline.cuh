// Rings of stages, ranges of work.
#pragma once

#include <cstdint>

#include "common/work_pool.h"
#include "ptx/mbarrier.cuh"
#include "ptx/special_register.cuh"

namespace cake {

template <int kStages>
struct RingPosition {
  int32_t stage = 0;
  uint32_t parity = 0;  // of the phase that a consumer waits for; a producer waits for parity ^ 1

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Stage and parity of the n-th use of a ring.
template <int kStages>
struct Slot {
  int32_t stage;
  uint32_t parity;
  __device__ __forceinline__ explicit Slot(uint32_t n)
      : stage(static_cast<int32_t>(n % kStages)), parity(n / kStages & 1) {}
};

// This CTA's part of `items` work items: one contiguous range of nearly equal size per CTA.
__device__ __forceinline__ Range cta_range(int32_t items) {
  return even_range(items, static_cast<int32_t>(gridDim.x), static_cast<int32_t>(blockIdx.x));
}

// Arrivals that a warp makes at a time: lane 0 for all, after what all have done (the kernels'
// charts count a warp as one). racecheck does not follow the other lanes' order and reports races
// that there are not; in a library built with CAKE_EVERY_LANE_ARRIVES, otherwise the same, there is
// nothing to report.
#ifdef CAKE_EVERY_LANE_ARRIVES
inline constexpr uint32_t kWarpArrivals = 32;
#else
inline constexpr uint32_t kWarpArrivals = 1;
#endif

// A warp's arrival that depends on a value: it cannot be performed before `word` exists. Nothing
// else keeps the machine from performing an arrival while loads of shared memory before it are in
// flight, and the next copy would then overwrite what they read.
__device__ __forceinline__ void release_after(uint64_t& barrier, int32_t lane, uint32_t word) {
  const uint32_t zero = ptx::ctaid_z();  // which the compiler does not know
  if (lane < static_cast<int32_t>(kWarpArrivals)) {
    ptx::mbarrier_arrive(ptx::shared_address(&barrier) + (word & zero));
  }
}

// A wait that does not begin before `word` exists: ptxas would move the computation behind it.
__device__ __forceinline__ void wait_after(uint64_t& barrier, uint32_t parity, uint32_t word) {
  ptx::mbarrier_wait(ptx::shared_address(&barrier) + (word & ptx::ctaid_z()), parity);
}

// The arrival of a warp whose loads of what the barrier guards have returned; `words` are loaded
// or computed from all of them.
template <class... Words>
__device__ __forceinline__ void release_loaded(uint64_t& barrier, int32_t lane, Words... words) {
  release_after(barrier, lane, __reduce_or_sync(0xFFFFFFFFu, (words | ...)));
}

// The arrival of a warp that has written what the barrier guards, or whose reads of it are known
// to have returned.
__device__ __forceinline__ void release(uint64_t& barrier, int32_t lane) {
  __syncwarp();
  if (lane < static_cast<int32_t>(kWarpArrivals)) {
    ptx::mbarrier_arrive(ptx::shared_address(&barrier));
  }
}

}  // namespace cake
