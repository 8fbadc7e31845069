// The warps of cake_fc1_sm100 that bring the tokens of a tile: rows by gathering TMA, scales, which
// lie in rows, through registers into the blocks of 128 x 4 that the tensor core reads.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/items.cuh"
#include "common/layout.h"
#include "common/model.cuh"
#include "common/pipeline.cuh"
#include "fc1/config_sm100.cuh"
#include "fc1/params.h"
#include "ptx/barrier.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tensor_copy.cuh"

namespace cake::fc1 {

inline constexpr int kTopK = 16;  // pairs of a token

// The pairs of a tile whose tokens a lane of a token warp copies: rows 4 lane .. 4 lane + 3 of the
// operand, scales of rows lane + 32 i. Beyond the last pair: one of a token beyond the input's.
template <int kN>
struct LanePairs {
  static constexpr int kScaled = (kN + 31) / 32;
  int32_t gathered[4];
  int32_t scaled[kScaled];

  __device__ __forceinline__ LanePairs(const Params& params, const Tile& tile, int32_t lane) {
    const auto pair = [&](int32_t n) {
      return n < tile.count ? params.expert_pairs[tile.first + n] : params.num_tokens * kTopK;
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      gathered[i] = pair(4 * lane + i);
    }
#pragma unroll
    for (int i = 0; i < kScaled; ++i) {
      scaled[i] = pair(lane + 32 * i);
    }
  }

  static __device__ __forceinline__ int32_t token(int32_t pair) {
    return static_cast<int32_t>(static_cast<uint32_t>(pair) / kTopK);
  }
};

// Scales of unit k of rows lane + 32 i, 16 bytes each; zeros beyond the last pair.
template <int kN>
__device__ __forceinline__ void load_token_scales(const Params& params, const LanePairs<kN>& pairs,
                                                  int32_t k, uint4 (&scales)[4]) {
  constexpr int kRowBytes = Sm100<kN>::kHidden / 16;
  constexpr int kUnitBytes = tcgen05::kLineK / 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    scales[i] = uint4{};
    if (i < LanePairs<kN>::kScaled) {
      const int32_t token = LanePairs<kN>::token(pairs.scaled[i]);
      if (token < params.num_tokens) {
        scales[i] =
            *reinterpret_cast<const uint4*>(params.input_sf + token * kRowBytes + k * kUnitBytes);
      }
    }
  }
}

// Each word of a row's scales goes to the block of another instruction, where those of rows lane,
// lane + 32, + 64 and + 96 lie side by side.
__device__ __forceinline__ void store_token_scales(uint32_t blocks, const uint4 (&scales)[4],
                                                   int32_t lane) {
  const uint32_t row = blocks + scale_block_offset(lane, 0);
  const auto store = [&](int step, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    ptx::st_shared(row + step * tcgen05::kScaleBlock, make_uint4(a, b, c, d));
  };
  store(0, scales[0].x, scales[1].x, scales[2].x, scales[3].x);
  store(1, scales[0].y, scales[1].y, scales[2].y, scales[3].y);
  store(2, scales[0].z, scales[1].z, scales[2].z, scales[3].z);
  store(3, scales[0].w, scales[1].w, scales[2].w, scales[3].w);
}

// Fills every fourth stage, first stage `turn`. The scales of the next one are fetched before it
// waits for that, the pairs of the next item while this one passes.
template <int kN>
__device__ __forceinline__ void load_tokens(const Params& params, const CUtensorMap& input_map,
                                            Sm100Storage<kN>& shared, const DealtItems& items,
                                            int32_t turn, int32_t lane) {
  using Config = Sm100<kN>;
  using Pairs = LanePairs<kN>;
  TileCursor<> cursor(items);
  Pairs pairs(params, cursor.tile(), lane);
  Pairs next_pairs = pairs;
  int32_t k = turn;
  uint4 scales[4];
  load_token_scales<kN>(params, pairs, k, scales);
  for (uint32_t use = turn; cursor.tile().count > 0; use += Config::kTokenWarps) {
    const Slot<Config::kStages> slot(use);
    typename Sm100Storage<kN>::Stage& stage = shared.stages[slot.stage];
    const uint32_t full = ptx::shared_address(&shared.full[slot.stage]);
    if (!model::planted(PlantedBug::kStageReuse)) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[slot.stage]), slot.parity ^ 1);
    }
    const int32_t columns = mma_columns(cursor.tile());
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(full, columns * tcgen05::kLineBytes);
    }
    __syncwarp();
    if (4 * lane < columns) {
      ptx::cp_async_bulk_tensor_2d_gather4(
          ptx::shared_address(stage.tokens) + 4 * lane * tcgen05::kLineBytes, input_map,
          k * tcgen05::kLineBytes, Pairs::token(pairs.gathered[0]), Pairs::token(pairs.gathered[1]),
          Pairs::token(pairs.gathered[2]), Pairs::token(pairs.gathered[3]), full);
    }
    __syncwarp();
    store_token_scales(ptx::shared_address(stage.token_scales), scales, lane);
    if (!model::planted(PlantedBug::kMissingProxyFence)) {
      ptx::fence_proxy_async();  // tcgen05.cp reads by the asynchronous proxy
    }
    release(shared.full[slot.stage], lane);
    if (k < Config::kTokenWarps) {  // the first of the item
      next_pairs = Pairs(params, cursor.next(), lane);
    }
    k += Config::kTokenWarps;
    if (k >= Config::kUnits) {
      k -= Config::kUnits;
      cursor.advance();
      pairs = next_pairs;
    }
    load_token_scales<kN>(params, pairs, k, scales);
  }
}

}  // namespace cake::fc1
