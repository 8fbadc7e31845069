// Shared memory of the decode kernel: eight slots, first FC1's weights, scales and sums, then FC2's
// stages.
#pragma once

#include <cstdint>

#include "common/pipeline.cuh"
#include "common/slots.cuh"
#include "decode/fc2_block_sm90.cuh"

namespace cake::decode {

inline constexpr int kMmaWarps = 16;  // of FC2, the last two of which do not multiply in FC1
inline constexpr int kLoadWarp = kMmaWarps;
inline constexpr int kPollWarp = kLoadWarp + 1;
inline constexpr int kThreads = (kMmaWarps + 4) * 32;  // whole warpgroups, for setmaxnreg
// Registers of a thread at launch, which are then moved to the MMA warps.
inline constexpr int kLaunchRegisters = 96;
inline constexpr int kMmaRegisters = 112;
inline constexpr int kLoadRegisters = 32;
static_assert(4 * kMmaRegisters + kLoadRegisters <= 5 * kLaunchRegisters, "too many registers");

struct Fc1 {
  static constexpr int kHidden = 3584;
  static constexpr int kIntermediate = 384;
  static constexpr int kRowBytes = kHidden / 2;
  static constexpr int kExpertRows = 2 * kIntermediate;
  static constexpr int kScaleBlockBytes = 128 * kHidden / 16;  // scales of 128 rows
  static constexpr int kGroups = kExpertRows / 32;             // 32-row groups of a tile
  static constexpr int kTilePairs = 8;                         // N of the MMA
  static constexpr int kMmaWarps = kHidden / 256;
  static constexpr int kEpilogueWarp = kMmaWarps;
  static constexpr int kStages = 5;
  static constexpr int kStageRows = 16;
  static constexpr int kStageBytes = kStageRows * kRowBytes;
};

struct Fc2 : Fc2Block {
  static constexpr int kBlockRows = kScaleRows;
  static constexpr int kExpertBlocks = kHidden / kBlockRows;
  static constexpr int kMmaGroups = 4;
  static constexpr int kStages = 8;
  static constexpr int kItems = 8;  // of a block or more: as many as fill the stages
  static constexpr int kWeightBytes = kBlockRows * kRowBytes;
};
static_assert(Fc2::kStages % Fc2::kMmaGroups == 0, "a stage must belong to one MMA group");
static_assert(kMmaWarps == 4 * Fc2::kMmaGroups);

struct alignas(16) Fc2Item {
  int32_t expert;
  int32_t first;  // index into expert_pairs
  int32_t count;  // pairs; 0 after the last item
  int32_t block;  // its first block of the launch's is the CTA's use `first_use` of a stage
  int32_t first_use;
  int32_t end_use;
};

// A range of FC1's 32-row groups. After the last one `begin` is negative and `end` the slot of
// FC1's ring that comes next.
struct GroupRange : Range {
  __device__ __forceinline__ bool is_end() const { return begin < 0; }
};

struct Storage {
  // FC1: 5 slots of weights, 2 of scales, 1 of two buffers of sums. FC2: its stages.
  uint8_t slots[Fc2::kStages][Fc1::kStageBytes];

  uint64_t fc1_full[Fc1::kStages];
  uint64_t fc1_empty[Fc1::kStages];
  uint64_t scales_full[2];
  uint64_t scales_empty[2];
  uint64_t sums_full[2];
  uint64_t sums_empty[2];
  uint64_t range_full;
  uint64_t range_empty;
  uint64_t fc1_left;
  uint64_t fc1_done;
  GroupRange range;

  Fc2Item items[Fc2::kItems];
  uint64_t item_full[Fc2::kItems];
  uint64_t item_empty[Fc2::kItems];
  uint64_t fc2_full[Fc2::kStages];
  uint64_t fc2_empty[Fc2::kStages];

  uint64_t token_full[kMmaWarps];
  uint2 token_rows[kTopK][Fc2::kRows / 4];  // bf16, by slot

  using Sums = float4[Fc1::kMmaWarps][2][32];  // [warp][16-row half][lane]

  __device__ __forceinline__ uint8_t* weights(int32_t stage) { return slots[stage]; }
  __device__ __forceinline__ uint8_t* scales(int32_t buffer) {
    return slots[Fc1::kStages + buffer];
  }
  __device__ __forceinline__ Sums& sums(int32_t buffer) {
    return reinterpret_cast<Sums*>(slots[Fc1::kStages + 2])[buffer];
  }
  // FC2's first stages take FC1's slots of weights in the order in which they become empty.
  __device__ __forceinline__ uint8_t* fc2_stage(int32_t stage, int32_t first_slot) {
    const int32_t slot = stage + first_slot;
    return slots[stage >= Fc1::kStages ? stage : slot >= Fc1::kStages ? slot - Fc1::kStages : slot];
  }
};
static_assert(Fc1::kScaleBlockBytes == Fc1::kStageBytes);
static_assert(2 * sizeof(Storage::Sums) == Fc1::kStageBytes);
static_assert(Fc2::kWeightBytes + Fc2::kScaleBytes <= Fc1::kStageBytes);
static_assert(Fc2::kStages == Fc1::kStages + 3);
static_assert(sizeof(Storage) <= 232448, "shared memory exceeds 227 KB");

}  // namespace cake::decode
