// FC1 and FC2 for few pairs per expert in one launch, sm_90a: bound by the stream of weights, which
// does not stop between the two. One CTA per SM, 20 warps:
//
//           FC1 (fc1_sm90.cuh)       FC2 (fc2_sm90.cuh)
//    0..13  MMA                      MMA
//   14      epilogue                 MMA
//   15      -                        MMA
//   16      one thread loads         the same
//   17      -                        one thread waits for FC1 of all CTAs, for the others
//   18, 19  - (setmaxnreg needs whole warpgroups)
//
// FC2 waits for all of FC1, on a counter in memory. A CTA takes its ranges of FC1 from a counter as
// well, until none is left, so that all are in hands of CTAs that run: the wait ends however few
// CTAs fit on the GPU beside other work.
//
// The kernel waits for routing before its first read (it needs the tile list), then releases the
// dependents.
#pragma once

#include <cstdint>

#include "common/pipeline.cuh"
#include "decode/fc1_sm90.cuh"
#include "decode/fc2_sm90.cuh"
#include "decode/params.h"
#include "decode/storage.cuh"
#include "decode/token_sm90.cuh"
#include "ptx/barrier.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/pdl.cuh"
#include "ptx/setmaxnreg.cuh"

namespace cake::decode {

__device__ __forceinline__ void init_barriers(Storage& shared) {
  const auto init = [](uint64_t& barrier, uint32_t arrivals) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
  };
  for (int s = 0; s < Fc1::kStages; ++s) {
    init(shared.fc1_full[s], 1);
    init(shared.fc1_empty[s], Fc1::kMmaWarps * kWarpArrivals);
  }
  for (int b = 0; b < 2; ++b) {
    init(shared.scales_full[b], 1);
    init(shared.scales_empty[b], Fc1::kMmaWarps * kWarpArrivals);
    init(shared.sums_full[b], Fc1::kMmaWarps * kWarpArrivals);
    init(shared.sums_empty[b], kWarpArrivals);
  }
  init(shared.range_full, 1);
  init(shared.range_empty, kMmaWarps * kWarpArrivals);
  init(shared.fc1_left, (Fc1::kMmaWarps + 1) * kWarpArrivals);
  init(shared.fc1_done, 1);
  for (int i = 0; i < Fc2::kItems; ++i) {
    init(shared.item_full[i], 1);
    init(shared.item_empty[i], kMmaWarps * kWarpArrivals);
  }
  for (int s = 0; s < Fc2::kStages; ++s) {
    init(shared.fc2_full[s], 1);
    init(shared.fc2_empty[s], 4 * kWarpArrivals);
  }
  for (int w = 0; w < kMmaWarps; ++w) {
    init(shared.token_full[w], 1);
  }
  ptx::fence_mbarrier_init();
}

// FC1's part of the warps that multiply in FC2; returns the first slot of FC2's ring.
__device__ __forceinline__ int32_t run_fc1(const Params& params, Storage& shared, int32_t warp,
                                           int32_t lane) {
  if (warp > Fc1::kEpilogueWarp) {
    return for_each_range(shared, lane, [](Range) {});
  }
  int32_t first_slot = 0;
  if (warp < Fc1::kMmaWarps) {
    Fc1MmaWarp mma(params.fc1, shared, warp, lane);
    first_slot = for_each_range(shared, lane, [&](Range range) { mma.run(range); });
  } else {
    RingPosition<2> sums;
    first_slot = for_each_range(shared, lane, [&](Range range) {
      run_epilogue(params.fc1, shared, range, sums, lane);
      count_done(params.ranges->done, lane);
    });
  }
  ptx::fence_proxy_async();  // copies come where the sums were written
  release(shared.fc1_left, lane);
  return first_slot;
}

// One thread: passes on to the warps that multiply that FC1 is done.
__device__ __forceinline__ void wait_for_fc1(const Params& params, Storage& shared) {
  ptx::mbarrier_wait(ptx::shared_address(&shared.fc1_left), 0);  // not before the CTA's own is
  wait_done(params.ranges->done, static_cast<int32_t>(gridDim.x));
  ptx::mbarrier_arrive(ptx::shared_address(&shared.fc1_done));
}

__device__ __forceinline__ void wait_for_routing() {
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
}

template <bool kOneToken>
__device__ __forceinline__ void load(const Params& params, Storage& shared, int32_t lane) {
  const bool is_leader = ptx::elect_sync();
  RingPosition<Fc1::kStages> fc1_ring;
  if (is_leader) {
    fc1_ring = load_fc1(params, shared);
  }
  if constexpr (kOneToken) {
    load_token(params.fc2, shared, fc1_ring, is_leader, lane);
  } else if (is_leader) {
    load_fc2(params.fc2, shared, fc1_ring);
  }
}

// kOneToken: FC2 finalizes (token_sm90.cuh).
template <bool kOneToken>
__global__ void __launch_bounds__(kThreads, 1)
    cake_decode_sm90(const __grid_constant__ Params params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  __trap();  // the plan never picks this kernel elsewhere
#else
  extern __shared__ __align__(128) uint8_t decode_storage[];
  Storage& shared = *reinterpret_cast<Storage*>(decode_storage);
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  if (threadIdx.x == 0) {
    init_barriers(shared);
  }
  __syncthreads();
  if (warp >= kLoadWarp) {
    ptx::setmaxnreg_dec<kLoadRegisters>();
    wait_for_routing();
    if (warp == kLoadWarp) {
      load<kOneToken>(params, shared, lane);
    } else if (warp == kPollWarp && lane == 0) {
      wait_for_fc1(params, shared);
    }
  } else {
    ptx::setmaxnreg_inc<kMmaRegisters>();
    wait_for_routing();
    const int32_t first_slot = run_fc1(params, shared, warp, lane);
    if constexpr (kOneToken) {
      run_token(params.fc2, shared, first_slot, warp, lane);
    } else {
      multiply_fc2(params.fc2, shared, first_slot, warp, lane);
    }
  }
#endif
}

}  // namespace cake::decode
