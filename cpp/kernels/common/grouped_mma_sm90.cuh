// The matrix product that FC1 and FC2 share for many pairs per expert, sm_90a: 128 prepared weight
// rows x up to 160 pairs of one expert on warpgroup MMA. Two MMA warpgroups have 64 weight rows
// each: codes from shared memory to registers, dequantized there, times the pairs' rows, which lie
// in shared memory as half. A stage is 128 columns of both.
//
// Within 64 columns (a block), thread t of a quad owns columns 16t .. 16t + 15 (8 bytes, one scale)
// of its weight rows, and takes them through the MMA's k positions 2t, 2t + 1, 2t + 8, 2t + 9 in
// the order of dequantize8. The pairs' columns are put at the same positions, so the order cancels:
// in 16-byte chunk 4v + i of a block lie, for t = 0 .. 3, elements i and i + 4 of columns 16t + 8v
// .. 16t + 8v + 7.
//
// Row g of a warp's 16 MMA rows is prepared row 16 (g % 2) + g / 2 + 4 (warp % 2) of a 32-row
// block, row g + 8 the one 8 below. In FC1 these are up and gate of feature 8 (warp % 2) + g; in
// FC2 outputs 16 (warp % 2) + 2g and + 1.
#pragma once

#include <cstdint>

#include "common/dequantize.cuh"
#include "common/pipeline.cuh"
#include "common/tile.h"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"

namespace cake::grouped_mma {

inline constexpr int kTilePairs = 160;  // most pairs of a tile: 80 sums of a thread
inline constexpr int kRows = 128;       // weight rows of an item
inline constexpr int kMmaWarps = 8;

inline constexpr int kBlockColumns = 64;  // one 128-byte row of halves
inline constexpr int kStageColumns = 2 * kBlockColumns;
inline constexpr int kScaleBlockBytes = 512;  // 128 rows x 4 scales
inline constexpr int kPairBlockBytes = kTilePairs * kBlockColumns * 2;
static_assert(kPairBlockBytes % 1024 == 0, "a block must keep the swizzle's alignment");

struct WeightStage {
  uint8_t codes[kRows * kStageColumns / 2];  // see weight_offset
  uint8_t scales[2][kScaleBlockBytes];
};
struct PairStage {
  uint8_t blocks[2][kPairBlockBytes];  // half, rows of 128 bytes, chunk c of row n at c ^ (n % 8)
};

// Byte of a weight stage: 64 bytes a row (two blocks of 32); rows 16 apart swap their blocks, so
// that the rows that a warp reads together lie in different banks.
__device__ __forceinline__ int32_t weight_offset(int32_t row, int32_t block) {
  return row * 64 + (block ^ (row >> 4 & 1)) * 32;
}

// Stage and parity of the n-th use of a ring.
template <int kStages>
struct Slot {
  int32_t stage;
  uint32_t parity;
  __device__ __forceinline__ explicit Slot(uint32_t n)
      : stage(static_cast<int32_t>(n % kStages)), parity(n / kStages & 1) {}
};

// Copies 128 columns of 128 weight rows: `codes` points at row 0, `scales` at the first of two
// scale blocks. A whole warp; the copies are announced by cp_async_mbarrier_arrive_noinc
// afterwards.
template <int kColumns>
__device__ __forceinline__ void load_weights(WeightStage& stage, const uint8_t* codes,
                                             const uint8_t* scales, int32_t lane) {
  constexpr int kRowBytes = kColumns / 2;
  const uint8_t* source = codes + lane / 4 * kRowBytes + lane % 4 * 16;
  const uint32_t destination = ptx::shared_address(stage.codes);
#pragma unroll
  for (int i = 0; i < kRows / 8; ++i) {
    const int32_t row = lane / 4 + 8 * i;
    ptx::cp_async_16(destination + weight_offset(row, lane % 4 / 2) + lane % 2 * 16,
                     source + i * 8 * kRowBytes);
  }
  const uint32_t scale_destination = ptx::shared_address(stage.scales[0]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int32_t offset = (lane + 32 * i) * 16;
    ptx::cp_async_16(scale_destination + offset, scales + offset);
  }
}

// The items of all tiles, `per_tile` of each, dealt out to the CTAs in turn: the items of a tile
// run at the same time and share its data in L2. The tile beyond the last item has count 0.
struct DealtItems {
  const Tile* tiles;
  int32_t num_tiles;
  int32_t per_tile;

  __device__ __forceinline__ int32_t item(int32_t i) const {
    return static_cast<int32_t>(blockIdx.x) + i * static_cast<int32_t>(gridDim.x);
  }
  __device__ __forceinline__ Tile tile(int32_t i) const {
    return item(i) < num_tiles * per_tile ? tiles[item(i) / per_tile] : Tile{};
  }
  __device__ __forceinline__ int32_t part(int32_t i) const { return item(i) % per_tile; }
};

// Walks the items of this CTA, with each tile looked up one item ahead.
class TileCursor {
 public:
  __device__ __forceinline__ explicit TileCursor(const DealtItems& items)
      : items_(items), tile_(items.tile(0)), next_(items.tile(1)) {}

  __device__ __forceinline__ const Tile& tile() const { return tile_; }
  __device__ __forceinline__ const Tile& next() const { return next_; }
  __device__ __forceinline__ int32_t index() const { return index_; }
  // Which of its tile's items this is, 0 .. per_tile - 1.
  __device__ __forceinline__ int32_t part() const { return items_.part(index_); }

  __device__ __forceinline__ void advance() {
    ++index_;
    tile_ = next_;
    next_ = items_.tile(index_ + 1);
  }

 private:
  const DealtItems items_;
  int32_t index_ = 0;
  Tile tile_;
  Tile next_;
};

// Both halves hold scale `t` of the four in `word`.
__device__ __forceinline__ __half2 broadcast_scale(uint32_t word, int32_t t) {
  return as_half2(ptx::cvt_half2_e4m3x2(__byte_perm(word, 0, t * 0x11)));
}

// A fragments of one 64-column block: four k steps.
struct Fragments {
  uint32_t step[4][4];
};

__device__ __forceinline__ void load_fragments(const WeightStage& stage, int32_t block, int32_t row,
                                               int32_t t, Fragments& out) {
  uint32_t low[2][4];
  uint32_t high[2][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t n = row + 8 * r;
    const uint2 codes =
        *reinterpret_cast<const uint2*>(stage.codes + weight_offset(n, block) + t * 8);
    const uint32_t word = *reinterpret_cast<const uint32_t*>(
        stage.scales[0] + block * kScaleBlockBytes + n % 32 * 16 + n / 32 * 4);
    const __half2 scale = broadcast_scale(word, t);
    dequantize8(codes.x, scale, r == 0 ? low[0] : high[0]);
    dequantize8(codes.y, scale, r == 0 ? low[1] : high[1]);
  }
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    out.step[s][0] = low[s / 2][2 * (s % 2)];
    out.step[s][1] = high[s / 2][2 * (s % 2)];
    out.step[s][2] = low[s / 2][2 * (s % 2) + 1];
    out.step[s][3] = high[s / 2][2 * (s % 2) + 1];
  }
}

// The prepared row of this lane's first MMA row within the 128 of an item.
__device__ __forceinline__ int32_t mma_row(int32_t warp, int32_t lane) {
  const int32_t g = lane / 4;
  return warp / 2 * 32 + warp % 2 * 4 + g % 2 * 16 + g / 2;
}

// Multiplies kStages stages. Pipeline gives weights(k), pairs(k), waits and releases; a block's
// fragments are made while the wgmmas of the block before run.
template <int N, int kStages, class Pipeline>
__device__ __forceinline__ void multiply(const Pipeline& pipeline, int32_t warp, int32_t lane,
                                         float (&sums)[kTilePairs / 2]) {
  const int32_t row = mma_row(warp, lane);
  const int32_t t = lane % 4;
  const auto multiply_block = [&](const Fragments& fragments, const uint8_t* block) {
    const uint64_t b = ptx::wgmma_descriptor_swizzle128(ptx::shared_address(block));
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      ptx::wgmma_m64k16<N>(sums, fragments.step[s], b + s * 2);  // 32 bytes a step
    }
    ptx::wgmma_commit_group();
  };
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    sums[i] = 0.0f;
  }
  Fragments first;
  Fragments second;
  pipeline.wait_weights(0);
  load_fragments(pipeline.weights(0), 0, row, t, first);
  for (int32_t k = 0; k < kStages; ++k) {
    pipeline.wait_pairs(k);
    multiply_block(first, pipeline.pairs(k).blocks[0]);
    load_fragments(pipeline.weights(k), 1, row, t, second);
    pipeline.release_weights(k);
    multiply_block(second, pipeline.pairs(k).blocks[1]);
    ptx::wgmma_wait_group<0>();
    pipeline.release_pairs(k);
    if (k + 1 < kStages) {
      pipeline.wait_weights(k + 1);
      load_fragments(pipeline.weights(k + 1), 0, row, t, first);
    }
  }
}

// multiply() with the smallest N that holds `count` pairs.
template <int kStages, class Pipeline>
__device__ __forceinline__ void multiply_tile(const Pipeline& pipeline, int32_t count, int32_t warp,
                                              int32_t lane, float (&sums)[kTilePairs / 2]) {
  const auto run = [&]<int N>() { multiply<N, kStages>(pipeline, warp, lane, sums); };
  switch ((count + 15) / 16) {
    case 1:
      run.template operator()<16>();
      break;
    case 2:
      run.template operator()<32>();
      break;
    case 3:
      run.template operator()<48>();
      break;
    case 4:
      run.template operator()<64>();
      break;
    case 5:
      run.template operator()<80>();
      break;
    case 6:
      run.template operator()<96>();
      break;
    case 7:
      run.template operator()<112>();
      break;
    case 8:
      run.template operator()<128>();
      break;
    case 9:
      run.template operator()<144>();
      break;
    default:
      run.template operator()<160>();
      break;
  }
}

}  // namespace cake::grouped_mma
