// Sizes and shared memory of cake_fc1_prefill_sm90.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/grouped_mma_sm90.cuh"
#include "common/items.cuh"

namespace cake::fc1 {

template <class Shape>
struct Prefill : Shape {
  static constexpr int kHidden = 3584;
  static constexpr int kIntermediate = 384;
  static constexpr int kRows = Shape::kWarpgroups * grouped_mma::kWarpgroupRows;
  static constexpr int kParts = 2 * kIntermediate / kRows;  // items of a tile
  // Few pairs leave room for stages of two units: weights in requests of 128 bytes, half the
  // barriers.
  static constexpr int kStageUnits = Shape::kTilePairs <= 64 ? 2 : 1;
  static constexpr int kItemStages = kHidden / grouped_mma::kUnitColumns / kStageUnits;
  static constexpr int kRowBytes = kStageUnits * grouped_mma::kUnitColumns / 2;  // of a stage
  static constexpr bool kSwizzled = kRowBytes == 128;  // 16-byte chunk c of row n at c ^ n % 8
  static constexpr int kUnitScaleBytes = 2 * grouped_mma::kScaleBlockBytes;  // of 128 rows
  static constexpr int kScaleBytes = kStageUnits * kUnitScaleBytes;
  static constexpr int kScaleBlocks = 2;  // of 128 rows, that an item has rows in
  // Halves of whole scale blocks may be dealt: MMA warps without rows are then idle.
  static constexpr bool kHalves = kRows == 256;
  using Items = std::conditional_t<kHalves, HalvedItems, DealtItems>;
  static constexpr int kBoxes = kHalves ? 2 : 1;  // copies of weights in a stage
  static constexpr int kBoxRows = kRows / kBoxes;
  static constexpr int kChunkPairs = 32;  // pairs whose activations are exchanged at a time

  // A stage is filled by kShares load warps; those of the next one are others, kTurns in all.
  static constexpr int kStages = kStageUnits == 1 && Shape::kWarpgroups == 4 ? 5 : 3;
  static constexpr int kTurns = kStages == 5 ? 4 : 2;
  static constexpr int kShares = grouped_mma::kLoadWarps / kTurns;
  // When a load warp waits for a stage, the use before the last of that stage has been released, so
  // that a parity is never ambiguous.
  static_assert(kTurns < kStages, "parity would be ambiguous");
  static_assert(kItemStages % kTurns == 0, "turns go by the item's stages");
  static_assert(Shape::kTilePairs / 8 % kShares == 0, "shares are whole groups of eight rows");
};

// What the MMA warps need to know of an item.
template <class Config>
struct PrefillItem {
  int32_t count;      // pairs; 0 after the last item
  int32_t first_row;  // of the expert's 768 prepared rows
  int32_t rows;
  float alpha;    // undoes the dequantization factors as well
  float q_scale;  // encoding scale of the intermediate
  float beta, linear_beta;
  alignas(16) int32_t pair_ids[32 * Config::kPairRegisters];
};

template <class Config>
struct PrefillStorage {
  struct Stage {
    grouped_mma::PairUnit<Config::kTilePairs> pairs[Config::kStageUnits];
    uint8_t codes[Config::kRows][Config::kRowBytes];
    uint8_t scales[Config::kScaleBlocks][Config::kScaleBytes];  // 512 bytes hold 4 columns
  } stages[Config::kStages];
  // Of two warps each: 16 features of a pair in a row, 16-byte chunk c at c ^ (pair / 2 % 4).
  float activations[Config::kMmaWarps / 2][Config::kChunkPairs][16];
  PrefillItem<Config> items[2];
  // Of each load warp: the tokens of rows 0, 2, 4, 6, then 1, 3, 5, 7 of every eight of its item;
  // rows beyond the last repeat token 0.
  alignas(16) uint32_t tokens[grouped_mma::kLoadWarps][Config::kTilePairs];
  uint64_t full[Config::kStages];
  uint64_t empty[Config::kStages];
  uint64_t item_full[2];
  static_assert(sizeof(Stage) % 1024 == 0, "a stage must keep the swizzle's alignment");
};

}  // namespace cake::fc1
