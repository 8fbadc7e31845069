// FC2 for few pairs per expert, sm_90a: bound by the weight stream. One BF16 row per pair.
//
// Work is the list of 128-row blocks of all tiles, in prepared order, cut into one contiguous range
// per CTA; one CTA per SM. 17 warps:
//
//   load warp     128 rows x 192 B and their scales (3072 B) per stage: two contiguous bulk copies
//   16 MMA warps  in four groups; group i takes every fourth block. A warp has 32 rows of the block
//                 and keeps the tile's intermediate (at most 8 pairs) in 48 registers while it
//                 walks the blocks of the tile
//
//   full[s]   load -> one MMA group: stage s holds data  (1 arrival + bytes)
//   empty[s]  that group -> load                         (4 arrivals)
//
// The number of stages is a multiple of the number of groups: a stage always belongs to one group,
// which therefore sees every phase of its barriers. Weights and tile list do not depend on FC1
// (which released this grid only after routing had finished), so the weights start before the wait.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/dequantize.cuh"
#include "common/pipeline.cuh"
#include "common/tile.cuh"
#include "fc2/params.h"
#include "ptx/bulk_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/pdl.cuh"

namespace cake::fc2 {

struct Decode {
  static constexpr int kHidden = 3584;
  static constexpr int kIntermediate = 384;
  static constexpr int kRowBytes = kIntermediate / 2;
  static constexpr int kScaleRowBytes = kIntermediate / 16;
  static constexpr int kBlockRows = 128;
  static constexpr int kExpertBlocks = kHidden / kBlockRows;
  static constexpr int kTilePairs = 8;
  static constexpr int kMmaGroups = 4;
  static constexpr int kMmaWarps = 4 * kMmaGroups;
  static constexpr int kThreads = (kMmaWarps + 1) * 32;
  static constexpr int kStages = 8;
  static constexpr int kWeightBytes = kBlockRows * kRowBytes;
  static constexpr int kScaleBytes = kBlockRows * kScaleRowBytes;
};
static_assert(Decode::kStages % Decode::kMmaGroups == 0, "a stage must belong to one MMA group");

struct DecodeStorage {
  struct Stage {
    uint8_t weights[Decode::kWeightBytes];
    uint8_t scales[Decode::kScaleBytes];
  } stages[Decode::kStages];
  uint64_t full[Decode::kStages];
  uint64_t empty[Decode::kStages];
};
static_assert(sizeof(DecodeStorage) <= 232448, "shared memory exceeds 227 KB");

// Walks the items of a range with a stride, without a division at each step.
struct Cursor {
  int32_t tile, block, num_blocks;

  __device__ __forceinline__ Cursor(int32_t item, int32_t blocks)
      : tile(item / blocks), block(item % blocks), num_blocks(blocks) {}

  __device__ __forceinline__ void advance(int32_t items) {
    block += items;
    while (block >= num_blocks) {
      block -= num_blocks;
      ++tile;
    }
  }
};

__device__ __forceinline__ void load_warp(const Params& params, DecodeStorage& shared,
                                          Range range) {
  const uint64_t policy = ptx::createpolicy_evict_first();
  RingPosition<Decode::kStages> ring;
  Cursor cursor(range.begin, params.num_blocks);
  int32_t expert = 0;
  for (int32_t item = range.begin; item < range.end; ++item, cursor.advance(1)) {
    if (item == range.begin || cursor.block == 0) {
      expert = load_tile(params.tiles + cursor.tile).expert;
    }
    const int64_t index =
        int64_t{expert} * Decode::kExpertBlocks + params.first_block + cursor.block;
    DecodeStorage::Stage& stage = shared.stages[ring.stage];
    const uint32_t full = ptx::shared_address(&shared.full[ring.stage]);
    ptx::mbarrier_wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, Decode::kWeightBytes + Decode::kScaleBytes);
    ptx::cp_async_bulk(ptx::shared_address(stage.weights), params.w2 + index * Decode::kWeightBytes,
                       Decode::kWeightBytes, full, policy);
    ptx::cp_async_bulk(ptx::shared_address(stage.scales),
                       params.w2_sf + index * Decode::kScaleBytes, Decode::kScaleBytes, full,
                       policy);
    ring.advance();
  }
}

// The tile's intermediate for this lane: columns 128c + 32t .. + 31 of pair `lane / 4`, c = 0, 1,
// 2: 32 codes and two scales each.
__device__ __forceinline__ void load_pairs(const Params& params, const Tile& tile, int32_t lane,
                                           uint32_t (&pairs)[3][4][4]) {
  const int32_t column = lane / 4;
  const int32_t t = lane % 4;
  const bool valid = column < tile.count;
  const int64_t pair = valid ? params.expert_pairs[tile.first + column] : 0;
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    uint4 codes{};
    uint32_t scales = 0;
    if (valid) {
      codes = *reinterpret_cast<const uint4*>(params.input + pair * Decode::kRowBytes + c * 64 +
                                              t * 16);
      scales = *reinterpret_cast<const uint16_t*>(params.input_sf + pair * Decode::kScaleRowBytes +
                                                  c * 8 + t * 2);
    }
    const ScalePair scale = scale_pair(scales);
    dequantize8(codes.x, scale.first, pairs[c][0]);
    dequantize8(codes.y, scale.first, pairs[c][1]);
    dequantize8(codes.z, scale.second, pairs[c][2]);
    dequantize8(codes.w, scale.second, pairs[c][3]);
  }
}

__device__ __forceinline__ void mma_warp(const Params& params, DecodeStorage& shared, Range range,
                                         int32_t warp, int32_t lane) {
  const int32_t group = warp / 4;
  const int32_t rows = warp % 4 * 32;  // this warp's 32 rows of a block
  const int32_t g = lane / 4;
  const int32_t t = lane % 4;
  uint32_t pairs[3][4][4];
  int32_t count = 0;  // pairs of the tile
  int32_t pair[2]{};  // ids of this lane's two pairs, columns 2t and 2t + 1
  float alpha = 0;    // undoes the dequantization factors as well
  int32_t current = -1;
  uint32_t n = 0;  // items of this warp so far
  Cursor cursor(range.begin + group, params.num_blocks);
  for (int32_t item = range.begin + group; item < range.end;
       item += Decode::kMmaGroups, cursor.advance(Decode::kMmaGroups), ++n) {
    constexpr uint32_t kGroupStages = Decode::kStages / Decode::kMmaGroups;
    const uint32_t stage = group + n % kGroupStages * Decode::kMmaGroups;
    if (cursor.tile != current) {
      current = cursor.tile;
      const Tile tile = load_tile(params.tiles + current);
      count = tile.count;
      for (int j = 0; j < 2; ++j) {
        pair[j] = 2 * t + j < count ? params.expert_pairs[tile.first + 2 * t + j] : 0;
      }
      alpha = params.fc2_alpha[tile.expert] * kDequantizedSquare;
      load_pairs(params, tile, lane, pairs);
    }
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[stage]), n / kGroupStages % 2);
    const uint8_t* weights = shared.stages[stage].weights + (rows + g) * Decode::kRowBytes + t * 16;
    // Scale blocks of 512 bytes hold 4 columns: [row % 32][row / 32 % 4][column % 4].
    const uint8_t* scales =
        shared.stages[stage].scales + t / 2 * 512 + g * 16 + warp % 4 * 4 + t % 2 * 2;
    float sums[2][4] = {};
#pragma unroll
    for (int c = 0; c < 3; ++c) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        uint4 codes[2];  // of rows 16m + g and 16m + g + 8
        ScalePair scale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int eight = 2 * m + r;
          codes[r] =
              *reinterpret_cast<const uint4*>(weights + eight * 8 * Decode::kRowBytes + c * 64);
          scale[r] =
              scale_pair(*reinterpret_cast<const uint16_t*>(scales + c * 1024 + eight * 128));
        }
        const uint32_t low[4] = {codes[0].x, codes[0].y, codes[0].z, codes[0].w};
        const uint32_t high[4] = {codes[1].x, codes[1].y, codes[1].z, codes[1].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          uint32_t a[4];
          uint32_t b[4];
          dequantize8(low[k], k < 2 ? scale[0].first : scale[0].second, a);
          dequantize8(high[k], k < 2 ? scale[1].first : scale[1].second, b);
          const uint32_t (&pair_words)[4] = pairs[c][k];
          ptx::mma_m16n8k16(sums[m], a[0], b[0], a[1], b[1], pair_words[0], pair_words[1]);
          ptx::mma_m16n8k16(sums[m], a[2], b[2], a[3], b[3], pair_words[2], pair_words[3]);
        }
      }
    }
    // The sums depend on the loads of the whole warp.
    release_after(shared.empty[stage], lane,
                  __float_as_uint(sums[0][0]) | __float_as_uint(sums[1][0]));
    // Prepared rows g, g + 8, g + 16, g + 24 are four consecutive outputs.
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (2 * t + j < count) {
        const __nv_bfloat162 low =
            __floats2bfloat162_rn(sums[0][j] * alpha, sums[0][2 + j] * alpha);
        const __nv_bfloat162 high =
            __floats2bfloat162_rn(sums[1][j] * alpha, sums[1][2 + j] * alpha);
        *reinterpret_cast<uint2*>(
            params.rows +
            (int64_t{pair[j]} * params.num_blocks + cursor.block) * Decode::kBlockRows + rows +
            g * 4) = make_uint2(*reinterpret_cast<const uint32_t*>(&low),
                                *reinterpret_cast<const uint32_t*>(&high));
      }
    }
  }
}

__global__ void __launch_bounds__(Decode::kThreads, 1)
    cake_fc2_decode_sm90(const __grid_constant__ Params params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  __trap();  // the plan never picks this kernel elsewhere
#else
  extern __shared__ __align__(128) uint8_t fc2_decode_storage[];
  DecodeStorage& shared = *reinterpret_cast<DecodeStorage*>(fc2_decode_storage);
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Decode::kStages; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[s]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[s]), 4);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  // Of items; item i is block i % num_blocks of tile i / num_blocks.
  const Range range = cta_range(load_num_tiles(params.num_tiles) * params.num_blocks);
  if (warp < Decode::kMmaWarps) {
    ptx::griddepcontrol_wait();
    mma_warp(params, shared, range, warp, lane);
  } else if (lane == 0) {
    load_warp(params, shared, range);
  }
#endif
}

}  // namespace cake::fc2
