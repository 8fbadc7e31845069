// The workspace of one call: which region lies where. Host and kernels take offsets from here only.
//
//   region          bytes                     lifetime
//   situ_beta       E * 4                     prepare -> forever (fixed prefix, any token count)
//   situ_linear_beta  E * 4                   prepare -> forever
//   input_packed    T * H/2                   quantize -> fc1
//   input_sf        T * H/16                  quantize -> fc1   (linear)
//   expert_offsets  (E + 1) * 4               route -> fc1, fc2 (CPU)
//   expert_pairs    P * 4                     route -> fc1, fc2 (pairs by expert, token, slot)
//   tiles           min(P, P/8 + E) * 16      route -> fc1, fc2 (CUDA)
//   num_tiles       4                         route -> fc1, fc2 (CUDA)
//   range_counters  8                         route -> decode kernel (sm_90)
//   fc1_packed      P * I/2                   fc1 -> fc2        (row = pair; on sm_100 position in
//                                                                expert_pairs)
//   fc1_sf          P * I/16                  fc1 -> fc2        (linear, rows likewise)
//   fc2_rows        min(P * H * 2, 224 MiB)   fc2 -> finalize   (some output columns at a time)
//   work_counter    4, pooled counts only     route -> fc2      (claims so far)
//
// With the prefill kernels fc2_rows first holds the dequantized input as half, T * H * 2 bytes:
// quantize -> fc1.
//
// T tokens, P = T * top_k pairs; pair p is slot p % top_k of token p / top_k. A call of many tokens
// goes through the stages in chunks of T <= kChunkTokens, one after the other in the same regions.
#pragma once

#include <array>
#include <cstdint>

#include "cake/fused_moe.h"
#include "common/tile.h"
#include "common/work_pool.h"

namespace cake {

inline constexpr int32_t kFc2BlockRows = 128;        // output columns of one block of FC2
inline constexpr int64_t kFc2RowsBytes = 224 << 20;  // most of FC2's result that exists at a time
inline constexpr int32_t kSmallestTilePairs = 8;
inline constexpr int32_t kChunkTokens = 8192;

// Tokens of a call's chunks: nearly equal, the last one may be smaller.
constexpr int32_t tokens_per_chunk(int32_t num_tokens) {
  const int32_t chunks = (num_tokens + kChunkTokens - 1) / kChunkTokens;
  return chunks <= 1 ? num_tokens : (num_tokens + chunks - 1) / chunks;
}

// Whole 128x4 blocks of scales, and sizes whose products fit.
constexpr bool is_supported(const Shape& s) {
  return s.hidden > 0 && s.hidden % 128 == 0 && s.hidden <= 65536 && s.intermediate > 0 &&
         s.intermediate % 64 == 0 && s.intermediate <= 65536 && s.num_experts > 0 &&
         s.num_experts <= 65536 && s.top_k > 0 && s.top_k <= 1024;
}

// Token counts of the pooled FC2, whose workspace has a work counter.
constexpr bool is_pooled(int32_t num_tokens) {
  return num_tokens >= 8 && num_tokens <= 1024 && (num_tokens & (num_tokens - 1)) == 0;
}

// Blocks of output columns that FC2 computes in one launch: as many as `part_bytes` hold, in parts
// of nearly equal size.
constexpr int32_t fc2_blocks_per_part(const Shape& shape, int32_t num_tokens, int64_t part_bytes) {
  const int64_t block_bytes = int64_t{num_tokens} * shape.top_k * kFc2BlockRows * 2;
  const int64_t blocks = shape.hidden / kFc2BlockRows;
  const int64_t fitting = block_bytes * blocks <= part_bytes ? blocks : part_bytes / block_bytes;
  const int64_t parts = (blocks + fitting - 1) / fitting;
  return static_cast<int32_t>((blocks + parts - 1) / parts);
}

struct Region {
  const char* name = "";
  int64_t offset = 0;  // bytes, a multiple of kWorkspaceAlignment
  int64_t bytes = 0;
};

struct Workspace {
  Region situ_beta;
  Region situ_linear_beta;
  Region input_packed;
  Region input_sf;
  Region expert_offsets;
  Region expert_pairs;
  Region tiles;
  Region num_tiles;
  Region range_counters;
  Region fc1_packed;
  Region fc1_sf;
  Region fc2_rows;
  Region work_counter;  // empty when not pooled
  int64_t total_bytes = 0;

  Workspace(const Shape& shape, int32_t num_tokens);

  // All regions, in the order of their offsets.
  std::array<const Region*, 13> regions() const {
    return {&situ_beta,      &situ_linear_beta, &input_packed, &input_sf,
            &expert_offsets, &expert_pairs,     &tiles,        &num_tiles,
            &range_counters, &fc1_packed,       &fc1_sf,       &fc2_rows,
            &work_counter};
  }
};

// The regions of a workspace at `base`, typed; work_counter is null when the token count is not
// pooled.
struct WorkspacePointers {
  float* situ_beta;
  float* situ_linear_beta;
  uint8_t* input_packed;
  uint8_t* input_sf;
  int32_t* expert_offsets;
  int32_t* expert_pairs;
  Tile* tiles;
  int32_t* num_tiles;
  RangeCounters* range_counters;
  uint8_t* fc1_packed;
  uint8_t* fc1_sf;
  uint16_t* fc2_rows;
  int32_t* work_counter;

  WorkspacePointers(void* base, const Workspace& layout);
};

}  // namespace cake
