// out[pair] = weights[expert of the pair's tile] . tokens[token of the pair]; 7 warps:
//
//   4 epilogue warps   accumulator to memory; a quarter of the rows each
//   1 load warp        one thread: weights, their scales, the tokens' codes
//   1 MMA warp         one thread: scales to tensor memory, products, commits
//   1 scale warp       the tokens' scales, stored by threads
//
//   full[s]    load thread (1, and bytes), scale warp (1) -> MMA thread
//   empty[s]   commit of the stage's products (1) -> load thread, scale warp
//   acc_full   commit of the tile's products (1) -> epilogue
//   acc_empty  epilogue warps (4) -> MMA thread
//
//   columns of tensor memory: 0 .. 15 accumulator; 32 + 32s: stage s, 16 of A's scales, 16 of B's
#include "common/layout.h"
#include "common/model.cuh"
#include "common/pipeline.cuh"
#include "common/tcgen05_layout.h"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/elect.cuh"
#include "ptx/pdl.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tensor_copy.cuh"
#include "tests/model/toy_gemm.h"

namespace cake::toy {
namespace {

constexpr int kThreads = 7 * 32;
constexpr int kStages = 2;
constexpr int kUnits = kK / tcgen05::kLineK;
constexpr int kSteps = tcgen05::kLineK / tcgen05::kMmaK;  // of a stage
constexpr int kScaleBytes = kSteps * tcgen05::kScaleBlock;
constexpr int kAllocated = 128;
constexpr int kTileBarrier = 1;

struct Storage {
  struct Stage {
    uint8_t a[kRows * tcgen05::kLineBytes];
    uint8_t b[kMaxPairs * tcgen05::kLineBytes];
    uint8_t a_scales[kScaleBytes];
    uint8_t b_scales[kScaleBytes];
  } stages[kStages];
  uint64_t full[kStages], empty[kStages], acc_full, acc_empty;
  uint32_t tensor_memory;
};

using Ring = RingPosition<kStages>;

__device__ __forceinline__ uint32_t address_of(const uint64_t& barrier) {
  return ptx::shared_address(&barrier);
}

__device__ __forceinline__ void wait_for_routing() {
  if (!model::planted(PlantedBug::kEarlyDependentRead)) {
    ptx::griddepcontrol_wait();
  }
}

__device__ __forceinline__ void load_thread(const Params& params, Storage& shared) {
  constexpr uint32_t kBytes = sizeof(Storage::Stage::a) + sizeof(Storage::Stage::b) + kScaleBytes;
  const uint64_t policy = ptx::createpolicy_evict_first();
  ptx::prefetch_tensormap(params.weights);
  wait_for_routing();
  Ring ring;
  for (int32_t i = blockIdx.x; i < params.num_tiles; i += gridDim.x) {
    const Tile tile = params.tiles[i];
    for (int32_t k = 0; k < kUnits; ++k, ring.advance()) {
      Storage::Stage& stage = shared.stages[ring.stage];
      const uint32_t full = address_of(shared.full[ring.stage]);
      if (!model::planted(PlantedBug::kStageReuse)) {
        ptx::mbarrier_wait(address_of(shared.empty[ring.stage]), ring.parity ^ 1);
      }
      ptx::mbarrier_arrive_expect_tx(full, kBytes);
      ptx::cp_async_bulk_tensor_2d(ptx::shared_address(stage.a), params.weights,
                                   k * tcgen05::kLineBytes, tile.expert * kRows, full, policy);
      ptx::cp_async_bulk(ptx::shared_address(stage.a_scales),
                         params.weight_sf + (tile.expert * kUnits + k) * kScaleBytes, kScaleBytes,
                         full, policy);
      const auto row = [&](int32_t n) {
        return n < tile.count ? params.token_ids[tile.first + n] : params.num_tokens;
      };
      for (int32_t n = 0; n < kMaxPairs; n += 4) {
        ptx::cp_async_bulk_tensor_2d_gather4(ptx::shared_address(stage.b) + n * tcgen05::kLineBytes,
                                             params.tokens, k * tcgen05::kLineBytes, row(n),
                                             row(n + 1), row(n + 2), row(n + 3), full);
      }
    }
  }
}

__device__ __forceinline__ void scale_warp(const Params& params, Storage& shared, int32_t lane) {
  wait_for_routing();
  Ring ring;
  for (int32_t i = blockIdx.x; i < params.num_tiles; i += gridDim.x) {
    const Tile tile = params.tiles[i];
    const bool exists = lane < tile.count;
    const uint8_t* const scales =
        params.token_sf + (exists ? params.token_ids[tile.first + lane] : 0) * (kK / 16);
    for (int32_t k = 0; k < kUnits; ++k, ring.advance()) {
      uint4 words = make_uint4(0, 0, 0, 0);
      if (exists) {
        words = *reinterpret_cast<const uint4*>(scales + k * 16);
      }
      if (!model::planted(PlantedBug::kStageReuse)) {
        ptx::mbarrier_wait(address_of(shared.empty[ring.stage]), ring.parity ^ 1);
      }
      const uint32_t to =
          ptx::shared_address(shared.stages[ring.stage].b_scales) + scale_block_offset(lane, 0);
      if (lane < kMaxPairs) {
        ptx::st_shared(to, words.x);
        ptx::st_shared(to + tcgen05::kScaleBlock, words.y);
        ptx::st_shared(to + 2 * tcgen05::kScaleBlock, words.z);
        ptx::st_shared(to + 3 * tcgen05::kScaleBlock, words.w);
      }
      if (!model::planted(PlantedBug::kMissingProxyFence)) {
        ptx::fence_proxy_async();
      }
      release(shared.full[ring.stage], lane);
    }
  }
}

__device__ __forceinline__ void mma_thread(const Params& params, Storage& shared) {
  ptx::griddepcontrol_wait();
  const uint32_t tensor_memory = shared.tensor_memory;
  Ring ring;
  RingPosition<1> accumulator;
  for (int32_t i = blockIdx.x; i < params.num_tiles; i += gridDim.x, accumulator.advance()) {
    const int32_t n = (params.tiles[i].count + 7) / 8 * 8;
    const uint32_t instruction =
        tcgen05::instruction_descriptor(n - (model::planted(PlantedBug::kWrongN) ? 8 : 0));
    if (!model::planted(PlantedBug::kAccumulatorReuse)) {
      ptx::mbarrier_wait(address_of(shared.acc_empty), accumulator.parity ^ 1);
    }
    for (int32_t k = 0; k < kUnits; ++k, ring.advance()) {
      const Storage::Stage& stage = shared.stages[ring.stage];
      if (!model::planted(PlantedBug::kMissingFullWait)) {
        ptx::mbarrier_wait(address_of(shared.full[ring.stage]), ring.parity);
      }
      ptx::tcgen05_fence_after_thread_sync();
      const uint32_t area = model::planted(PlantedBug::kScaleReuse) ? 0 : ring.stage * 32;
      const uint32_t a_scale = tensor_memory + 32 + area;
      const uint32_t b_scale = a_scale + 16;
      const uint64_t a = tcgen05::operand_descriptor(ptx::shared_address(stage.a));
      uint64_t b = tcgen05::operand_descriptor(ptx::shared_address(stage.b));
      if (model::planted(PlantedBug::kWrongSwizzle)) {
        b &= ~(uint64_t{7} << 61);
      }
      const uint64_t a_block = tcgen05::scale_descriptor(ptx::shared_address(stage.a_scales));
      const uint64_t b_block = tcgen05::scale_descriptor(ptx::shared_address(stage.b_scales));
      for (int32_t q = 0; q < kSteps; ++q) {
        ptx::tcgen05_cp_32x128b_warpx4(a_scale + 4 * q,
                                       tcgen05::advance(a_block, q * tcgen05::kScaleBlock));
        ptx::tcgen05_cp_32x128b_warpx4(b_scale + 4 * q,
                                       tcgen05::advance(b_block, q * tcgen05::kScaleBlock));
      }
      const int32_t shift = model::planted(PlantedBug::kWrongScaleColumn) ? 4 : 0;
      for (int32_t q = 0; q < kSteps; ++q) {
        ptx::tcgen05_mma_mxf4nvf4_block16(tensor_memory, tcgen05::advance(a, q * 32),
                                          tcgen05::advance(b, q * 32), instruction,
                                          a_scale + 4 * q + shift, b_scale + 4 * q, (k | q) != 0);
      }
      ptx::tcgen05_commit(address_of(shared.empty[ring.stage]));
    }
    ptx::tcgen05_commit(address_of(shared.acc_full));
  }
}

__device__ __forceinline__ void epilogue_warp(const Params& params, Storage& shared, int32_t warp,
                                              int32_t lane) {
  ptx::griddepcontrol_wait();
  const uint32_t rows = shared.tensor_memory + tcgen05::tensor_address(warp * 32, 0);
  RingPosition<1> accumulator;
  for (int32_t i = blockIdx.x; i < params.num_tiles; i += gridDim.x, accumulator.advance()) {
    const Tile tile = params.tiles[i];
    const int32_t count = tile.count - (model::planted(PlantedBug::kTail) ? 1 : 0);
    if (!model::planted(PlantedBug::kMissingCommitWait)) {
      ptx::mbarrier_wait(address_of(shared.acc_full), accumulator.parity);
    }
    if (!model::planted(PlantedBug::kMissingFenceAfter)) {
      ptx::tcgen05_fence_after_thread_sync();
    }
    for (int32_t n = 0; n < count; n += 8) {
      uint32_t words[2][4];
      ptx::tcgen05_ld_16x256b(words[0], rows + n);
      ptx::tcgen05_ld_16x256b(words[1], rows + tcgen05::tensor_address(16, n));
      if (!model::planted(PlantedBug::kMissingLoadWait)) {
        ptx::tcgen05_wait_ld(words[0], words[1]);
      }
#pragma unroll
      for (int32_t w = 0; w < 8; ++w) {
        const tcgen05::Position at = tcgen05::position_16x256b(lane, w % 4);
        const int32_t row = warp * 32 + w / 4 * 16 + at.lane;
        if (n + at.column < count) {
          params.out[(tile.first + n + at.column) * kRows + row] =
              __uint_as_float(words[w / 4][w % 4]);
        }
      }
    }
    if (!model::planted(PlantedBug::kMissingFenceBefore)) {
      ptx::tcgen05_fence_before_thread_sync();
    }
    release(shared.acc_empty, lane);
  }
}

__global__ void __launch_bounds__(kThreads + model::kEngineThreads, 1)
    toy_gemm_sm100(const __grid_constant__ Params params) {
#if CAKE_HAS_TCGEN05
  const model::Engine engine(kThreads);
  if (engine.ran()) {
    return;
  }
  extern __shared__ __align__(1024) uint8_t toy_storage[];
  Storage& shared = *reinterpret_cast<Storage*>(toy_storage);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  if (warp == 5) {
    ptx::tcgen05_alloc<kAllocated>(ptx::shared_address(&shared.tensor_memory));
    ptx::tcgen05_relinquish_alloc_permit();
  } else if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(address_of(shared.full[s]), 2);
      ptx::mbarrier_init(address_of(shared.empty[s]), 1);
    }
    ptx::mbarrier_init(address_of(shared.acc_full), 1);
    ptx::mbarrier_init(address_of(shared.acc_empty), 4);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  ptx::tcgen05_fence_before_thread_sync();
  ptx::bar_sync(kTileBarrier, kThreads);
  ptx::tcgen05_fence_after_thread_sync();
  if (warp < 4) {
    epilogue_warp(params, shared, warp, lane);
  } else if (warp == 4) {
    if (ptx::elect_sync()) {
      load_thread(params, shared);
    }
  } else if (warp == 5) {
    if (ptx::elect_sync()) {
      mma_thread(params, shared);
    }
  } else {
    scale_warp(params, shared, lane);
  }
  __syncwarp();
  ptx::tcgen05_fence_before_thread_sync();
  ptx::bar_sync(kTileBarrier, kThreads);
  ptx::tcgen05_fence_after_thread_sync();
  if (warp == 5 && !model::planted(PlantedBug::kMissingDealloc)) {
    ptx::tcgen05_dealloc<kAllocated>(shared.tensor_memory);
  }
#endif
}

}  // namespace

Status launch_toy_gemm(const Params& params, int32_t num_ctas) {
  CAKE_RETURN_IF_ERROR(load_kernel("toy_gemm_sm100", &toy_gemm_sm100, sizeof(Storage)));
  LaunchConfig where;
  where.grid = dim3(static_cast<unsigned>(num_ctas));
  where.block = dim3(kThreads + model::kEngineThreads);
  where.shared_bytes = sizeof(Storage);
  return launch("toy_gemm_sm100", where, &toy_gemm_sm100, params);
}

}  // namespace cake::toy
