// Sizes and shared memory of cake_fc2_prefill_sm90.
#pragma once

#include <cstdint>

#include "common/grouped_mma_sm90.cuh"
#include "common/work_pool.cuh"

namespace cake::fc2 {

struct Prefill : grouped_mma::Narrow {
  static constexpr int kHidden = 3584;
  static constexpr int kIntermediate = 384;
  static constexpr int kRowBytes = kIntermediate / 2;
  static constexpr int kBlockRows = 128;
  static constexpr int kExpertBlocks = kHidden / kBlockRows;
  static constexpr int kUnits = kIntermediate / grouped_mma::kUnitColumns;
  static constexpr int kStages = 4;
  static constexpr int kSlots = 4;  // for units of pairs; unit k of item i is in (3 i + k) % 4
  static constexpr int kWorks = 4;  // at most so many items are ahead of their description
  static constexpr int kUnpackWarps = 3;
  // More tiles are not cut into ranges: most experts have two or more.
  static constexpr int kMostTilesCut = 1344;
  static constexpr int kWeightBytes = kBlockRows * kRowBytes;
  static constexpr int kScaleBytes = kBlockRows * kIntermediate / 16;
};
static_assert(Prefill::kStages % 2 == 0, "a stage must belong to one pair of warpgroups");
static_assert(Prefill::kUnpackWarps + 1 == grouped_mma::kLoadWarps);

// What the MMA warps need to know of an item.
struct PrefillItem {
  int32_t count;      // pairs; 0 after the last item
  uint32_t unit_use;  // its first unit of pairs is the CTA's use `unit_use` of a slot
  int32_t block;      // its first block of the launch's is the CTA's use `first_use` of a stage
  int32_t first_use;
  int32_t end_use;
  float alpha;  // undoes the dequantization factors as well
  alignas(16) int32_t pair_ids[32 * Prefill::kPairRegisters];
};

// A pair's intermediate as FC1 left it. The padding puts eight pairs' words into different banks.
struct alignas(16) PackedPair {
  uint8_t codes[Prefill::kRowBytes + 16];
  uint8_t scales[Prefill::kIntermediate / 16];
  uint8_t unused[8];
};

struct PrefillStorage {
  grouped_mma::PairUnit<Prefill::kTilePairs> pairs[Prefill::kSlots];
  struct Stage {
    uint8_t codes[Prefill::kBlockRows][Prefill::kRowBytes];
    uint8_t scales[Prefill::kScaleBytes];  // 512 bytes hold 4 columns of 128 rows
  } stages[Prefill::kStages];
  PackedPair packed[Prefill::kTilePairs];  // of the item that is being or will be unpacked
  PrefillItem items[3];  // the item before last may still be stored when an item is described
  TileBlocks work[Prefill::kWorks];  // the items in order, before they are described
  uint64_t full[Prefill::kStages];
  uint64_t empty[Prefill::kStages];
  uint64_t pairs_full[Prefill::kSlots];
  uint64_t pairs_empty[Prefill::kSlots];
  uint64_t work_full[Prefill::kWorks];
  uint64_t work_empty[Prefill::kWorks];
};
static_assert(sizeof(PrefillStorage) <= 232448, "shared memory exceeds 227 KB");

}  // namespace cake::fc2
