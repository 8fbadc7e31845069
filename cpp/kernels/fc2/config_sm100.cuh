// Sizes, shared memory and tensor memory of cake_fc2_sm100.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/model.cuh"
#include "common/tcgen05_layout.h"

namespace cake::fc2 {

// kN: most pairs of a tile.
template <int kN>
struct Sm100 {
  static_assert(kN % 8 == 0 && kN >= 8 && kN <= 128, "pairs of a tile: a multiple of 8 up to 128");
  static constexpr int kExperts = 896;
  static constexpr int kIntermediate = 384;
  static constexpr int kRowBytes = kIntermediate / 2;
  static constexpr int kScaleRowBytes = kIntermediate / 16;
  static constexpr int kBlockRows = tcgen05::kMmaRows;
  static constexpr int kExpertBlocks = 3584 / kBlockRows;
  static constexpr int kSteps = kIntermediate / tcgen05::kMmaK;  // instructions of a block
  // An operand is copied in boxes of 128 bytes. The second box lies half beyond the row: TMA fills
  // that half with zeros, which costs shared memory (a fourth of a stage) but no traffic. With the
  // 64-byte swizzle instead, one stage more would fit; these are enough (see kStages).
  static constexpr int kLines = (kRowBytes + tcgen05::kLineBytes - 1) / tcgen05::kLineBytes;
  static constexpr int kLineSteps = tcgen05::kLineK / tcgen05::kMmaK;
  static constexpr int kStepBytes = tcgen05::kMmaK / 2;  // of an operand's row
  static constexpr int kScaleBytes = kSteps * tcgen05::kScaleBlock;

  static constexpr int kEpilogueWarps = 4;
  static constexpr int kLoadWarp = kEpilogueWarps;
  static constexpr int kMmaWarp = kLoadWarp + 1;
  static constexpr int kTokenWarp = kMmaWarp + 1;
  static constexpr int kThreads = (kTokenWarp + 1) * 32;

  static constexpr int kItems = 8;  // the load thread is ahead of the epilogue by at most so many
  static constexpr int kTokenSlots = kN <= 32 ? 3 : 2;
  // Accumulators. Four take what has gathered in the ring when FC1 ends.
  static constexpr int kSums = kN <= 64 ? 4 : 2;
  // Pairs come in groups: a box of TMA, a load of tensor memory. The instructions have whole groups
  // as columns, so that none is read that was not written.
  static constexpr int kGroupPairs = std::min(kN, 16);

  struct Stage {  // of a block
    uint8_t weights[kLines][kBlockRows * tcgen05::kLineBytes];
    uint8_t scales[kScaleBytes];
  };
  struct Tokens {  // of a tile
    uint8_t rows[kLines][kN * tcgen05::kLineBytes];
    uint8_t scales[kScaleBytes];
  };
  struct Item {  // consecutive blocks of a tile
    int32_t expert;
    int32_t first;  // place of the tile's first pair in expert_pairs
    int32_t count;  // pairs; 0: the end
    int32_t begin, end;
    float alpha;
    alignas(16) uint32_t row_offsets[kN];  // bytes: where the pairs' output rows begin
  };

  static constexpr int kBarrierBytes = 512;  // more than the barriers take
  static constexpr int kStages =
      (model::kMaxSharedBytes - kBarrierBytes - kTokenSlots * static_cast<int>(sizeof(Tokens)) -
       kItems * static_cast<int>(sizeof(Item))) /
      static_cast<int>(sizeof(Stage));
  // 8 TB/s over 148 SMs, 1 us from request to data; one stage is being multiplied.
  static_assert((kStages - 1) * kBlockRows * (kRowBytes + kScaleRowBytes) >= 54 * 1024,
                "too few bytes in flight");

  // Columns of tensor memory: accumulators, then the scales of the stages and of the token slots.
  static constexpr int kSumColumns = std::max(kN, 32);
  static constexpr int kStepColumns = tcgen05::scale_columns(128);
  static constexpr int kScaleColumns = kSteps * kStepColumns;  // of a stage or a slot
  static constexpr int kWeightScales = kSums * kSumColumns;
  static constexpr int kTokenScales = kWeightScales + kStages * kScaleColumns;
  static_assert(kTokenScales + kTokenSlots * kScaleColumns <= tcgen05::kColumns,
                "tensor memory exceeds 512 columns");
};

template <int kN>
struct Sm100Storage {
  using Config = Sm100<kN>;
  typename Config::Stage stages[Config::kStages];
  typename Config::Tokens tokens[Config::kTokenSlots];
  typename Config::Item items[Config::kItems];
  uint64_t item_full[Config::kItems];
  uint64_t item_ready[Config::kItems];
  uint64_t item_empty[Config::kItems];
  uint64_t full[Config::kStages];
  uint64_t empty[Config::kStages];
  uint64_t tokens_full[Config::kTokenSlots];
  uint64_t tokens_empty[Config::kTokenSlots];
  uint64_t sums_full[Config::kSums];
  uint64_t sums_empty[Config::kSums];
  uint32_t tensor_memory;

  static_assert(sizeof(typename Config::Stage) % 1024 == 0 &&
                    sizeof(typename Config::Tokens) % 1024 == 0,
                "operands must keep the swizzle's alignment");
};

// Columns of the matrix instructions of a tile of `count` pairs.
template <int kN>
__device__ __forceinline__ int32_t mma_columns(int32_t count) {
  constexpr int kGroup = Sm100<kN>::kGroupPairs;
  return (count + kGroup - 1) / kGroup * kGroup;
}

}  // namespace cake::fc2
