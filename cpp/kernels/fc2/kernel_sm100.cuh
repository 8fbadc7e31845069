// FC2, sm_100a and sm_103a: block-scaled FP4 matrix instructions with a block of 128 prepared
// weight rows as their rows and the pairs of a tile as their columns; K = 384 is six of them. One
// BF16 row per pair.
//
// Item = consecutive blocks of a tile, from common/work_pool.cuh. One CTA per SM, 7 warps:
//
//   4 epilogue warps   warp w: prepared rows 32w .. 32w + 31, 32 outputs of every pair
//   1 load warp        one thread: takes the items and describes them; codes of a block by TMA, its
//                      scales by a bulk copy
//   1 MMA warp         one thread: scales to tensor memory, matrix instructions
//   1 token warp       once per item: the tile's rows by TMA, their scales through registers into
//                      blocks of 128 x 4, where the pairs' outputs go
//
//   item_full / item_empty[i]       load -> token, MMA; epilogue -> load   (1 arrival / 4)
//   item_ready[i]                   token -> epilogue: all is described    (1 arrival)
//   full / empty[s]                 load <-> MMA         (1 arrival + bytes / 1 commit)
//   tokens_full / tokens_empty[t]   token <-> MMA        (2 arrivals + bytes / 1 commit)
//   sums_full / sums_empty[b]       MMA <-> epilogue     (1 commit / 4 arrivals)
//
//   load       i: 0 1 2 3 | i + 1: 0 1 2 ..     blocks, until the ring is full
//   token      i | i + 1 ..                     until the slots are full
//   MMA                  i: 0 1 2 3 | i + 1: ..  one block after the other, as the weights come
//   epilogue                0 1 2 3 |  ..
//
// The items, their tokens and their weights come ahead of the MMA thread, so that the ring of
// stages never drains at an item's end. Tokens stay in their slot while the item's blocks pass.
//
// A stage and a slot have their own columns of tensor memory for scales, guarded by the same
// commits: a copy of scales may overtake an earlier instruction that still reads what it
// overwrites.
//
// Tokens lie in the order of expert_pairs: after a tile's rows come those of other tiles or, beyond
// the last pair, zeros. They make columns of their own, which nobody stores.
//
// Weights and tile list do not depend on FC1 (which released this grid only after routing had
// finished), so the weights start before the wait. The token warp waits; matrix instructions and
// stores follow what it has read, so that rows are not stored while others still read older ones.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/model.cuh"
#include "common/swizzled_storage.cuh"
#include "common/tensor_memory.cuh"
#include "fc2/config_sm100.cuh"
#include "fc2/epilogue_sm100.cuh"
#include "fc2/mainloop_sm100.cuh"
#include "fc2/params.h"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/pdl.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tensor_copy.cuh"

namespace cake::fc2 {

template <int kN>
__device__ __forceinline__ void init_barriers(Sm100Storage<kN>& shared) {
  const auto init = [](auto& barriers, uint32_t arrivals) {
    for (uint64_t& barrier : barriers) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
    }
  };
  init(shared.item_full, 1);
  init(shared.item_ready, kWarpArrivals);
  init(shared.item_empty, Sm100<kN>::kEpilogueWarps * kWarpArrivals);
  init(shared.full, 1);
  init(shared.empty, 1);
  init(shared.tokens_full, 1 + kWarpArrivals);  // rows; scales
  init(shared.tokens_empty, 1);
  init(shared.sums_full, 1);
  init(shared.sums_empty, Sm100<kN>::kEpilogueWarps * kWarpArrivals);
  ptx::fence_mbarrier_init();
}

template <int kN>
__global__ void __launch_bounds__(Sm100<kN>::kThreads + model::kEngineThreads, 1)
    cake_fc2_sm100(const __grid_constant__ Params params,
                   const __grid_constant__ CUtensorMap w2_map,
                   const __grid_constant__ CUtensorMap input_map) {
#if !CAKE_HAS_TCGEN05
  __trap();  // the plan never picks this kernel elsewhere
#else
  using Config = Sm100<kN>;
  extern __shared__ __align__(1024) uint8_t fc2_sm100_storage[];
  const model::Engine engine(Config::kThreads);
  if (engine.ran()) {
    return;
  }
  static_assert(sizeof(Sm100Storage<kN>) <= model::kMaxSharedBytes, "too much shared memory");
  auto& shared = swizzled_storage<Sm100Storage<kN>>(fc2_sm100_storage);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  if (warp == Config::kMmaWarp) {
    allocate_tensor_memory(shared.tensor_memory);
  } else if (warp == Config::kLoadWarp && lane == 0) {
    ptx::prefetch_tensormap(w2_map);
    ptx::prefetch_tensormap(input_map);
    init_barriers(shared);
  }
  sync_tensor_memory(Config::kThreads);
  const uint32_t tensor_memory = shared.tensor_memory;
  ptx::griddepcontrol_launch_dependents();
  if (warp < Config::kEpilogueWarps) {
    epilogue_warp(params, shared, tensor_memory, warp, lane);
  } else if (warp == Config::kTokenWarp) {
    load_tokens(params, input_map, shared, lane);
  } else if (ptx::elect_sync()) {
    if (warp == Config::kLoadWarp) {
      load_weights(params, w2_map, shared);
    } else {
      multiply(shared, tensor_memory);
    }
  }
  sync_tensor_memory(Config::kThreads);
  if (warp == Config::kMmaWarp && !model::planted(PlantedBug::kMissingDealloc)) {
    ptx::tcgen05_dealloc<tcgen05::kColumns>(tensor_memory);
  }
#endif
}

}  // namespace cake::fc2
