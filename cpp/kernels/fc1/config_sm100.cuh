// Sizes and shared memory of cake_fc1_sm100.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/model.cuh"
#include "common/tcgen05_layout.h"
#include "common/tile.h"

namespace cake::fc1 {

// kN: most pairs of a tile.
template <int kN>
struct Sm100 {
  static_assert(kN % 8 == 0 && kN >= 8 && kN <= 128, "pairs of a tile: a multiple of 8 up to 128");
  static constexpr int kExperts = 896;
  static constexpr int kHidden = 3584;
  static constexpr int kIntermediate = 384;
  static constexpr int kRows = tcgen05::kMmaRows;
  static constexpr int kParts = 2 * kIntermediate / kRows;         // items of a tile
  static constexpr int kUnits = kHidden / tcgen05::kLineK;         // stages of an item
  static constexpr int kSteps = tcgen05::kLineK / tcgen05::kMmaK;  // instructions of a stage
  static constexpr int kStepBytes = tcgen05::kMmaK / 2;            // of an operand's row
  static constexpr int kUnitScaleBytes = kSteps * tcgen05::kScaleBlock;
  static constexpr int kItemScaleBytes = kUnits * kUnitScaleBytes;

  static constexpr int kEpilogueWarps = 4;
  static constexpr int kWeightWarp = kEpilogueWarps;
  static constexpr int kMmaWarp = kWeightWarp + 1;
  static constexpr int kFirstTokenWarp = kMmaWarp + 1;
  static constexpr int kTokenWarps = 4;
  static constexpr int kThreads = (kFirstTokenWarp + kTokenWarps) * 32;

  static constexpr int kBarrierBytes = 512;  // more than the barriers take
  static constexpr int kStageBytes = (kRows + kN) * tcgen05::kLineBytes + 2 * kUnitScaleBytes;
  static constexpr int kStages = (model::kMaxSharedBytes - kBarrierBytes) / kStageBytes;

  // Columns of tensor memory: two accumulators, then the scales of the stages.
  static constexpr int kSumColumns = std::max(kN, 32);
  static constexpr int kFirstScaleColumn = 2 * kSumColumns;
  static constexpr int kWeightScaleColumns = kSteps * tcgen05::scale_columns(kRows);
  static constexpr int kStageColumns = kWeightScaleColumns + kSteps * tcgen05::scale_columns(kN);
};

template <int kN>
struct Sm100Storage {
  using Config = Sm100<kN>;
  struct Stage {
    uint8_t weights[Config::kRows][tcgen05::kLineBytes];  // 128-byte swizzle, as are the tokens
    uint8_t tokens[kN][tcgen05::kLineBytes];
    uint8_t weight_scales[Config::kSteps][tcgen05::kScaleBlock];
    uint8_t token_scales[Config::kSteps][tcgen05::kScaleBlock];
  } stages[Config::kStages];
  uint64_t full[Config::kStages];
  uint64_t empty[Config::kStages];
  uint64_t sums_full[2];
  uint64_t sums_empty[2];
  uint32_t tensor_memory;

  static_assert(sizeof(Stage) == Config::kStageBytes);
  static_assert(sizeof(Stage) % 1024 == 0, "a stage must keep the swizzle's alignment");
  static_assert(Config::kTokenWarps <= Config::kStages, "a token warp's parity would be ambiguous");
  static_assert(Config::kFirstScaleColumn + Config::kStages * Config::kStageColumns <=
                    tcgen05::kColumns,
                "tensor memory exceeds 512 columns");
};

// Columns of the matrix instructions of a tile.
__device__ __forceinline__ int32_t mma_columns(const Tile& tile) { return (tile.count + 7) & ~7; }

}  // namespace cake::fc1
