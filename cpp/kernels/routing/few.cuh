// Routing of up to kFewPairs pairs by one CTA, without any barrier but two: each thread counts the
// pairs before its own.
#pragma once

#include <cstdint>

#include "routing/params.cuh"

namespace cake::routing {

inline constexpr int kFewPairs = 32;

struct FewStorage {
  int4 experts[kFewPairs / 4];  // of the pairs, kExperts for an empty slot
  int4 tiles[kFewPairs / 4];    // expert * 256, plus its number of tiles at its first pair
};

// One pair a thread of the first warps.
__device__ __forceinline__ void route_few(const Params& params, FewStorage& shared) {
  const auto pair = static_cast<int32_t>(threadIdx.x);
  int32_t expert = kExperts;
  if (pair < kFewPairs) {
    expert = expert_of(load_id(params, pair, params.num_pairs));
    reinterpret_cast<int32_t*>(shared.experts)[pair] = expert;
  }
  __syncthreads();
  // Calls visit(i, word i of `words`) for every pair; their number is a multiple of 16.
  const auto for_all = [&](const int4* words, const auto& visit) {
    for (int32_t i = 0; i < params.num_pairs; i += 4) {
      const int4 four = words[i / 4];
      visit(i, four.x);
      visit(i + 1, four.y);
      visit(i + 2, four.z);
      visit(i + 3, four.w);
    }
  };
  int32_t before = 0;  // pairs of experts before this one
  int32_t ahead = 0;   // earlier pairs of this expert
  int32_t total = 0;   // all pairs of this expert
  int32_t num_tiles = 0;
  if (pair < kFewPairs) {
    for_all(shared.experts, [&](int32_t i, int32_t other) {
      before += other < expert ? 1 : 0;
      total += other == expert ? 1 : 0;
      ahead += other == expert && i < pair ? 1 : 0;
    });
    const bool first = expert < kExperts && ahead == 0;
    num_tiles = first ? tiles_of(params, total) : 0;
    static_assert(kFewPairs < 256);
    reinterpret_cast<int32_t*>(shared.tiles)[pair] = expert * 256 + num_tiles;
    if (expert < kExperts) {
      params.expert_pairs[before + ahead] = pair;
    }
  }
  __syncthreads();  // one for all: synccheck counts barriers by their place in the code
  if (pair >= kFewPairs) {
    return;
  }
  int32_t first_tile = 0;
  int32_t all_tiles = 0;
  for_all(shared.tiles, [&](int32_t, int32_t other) {
    all_tiles += other % 256;
    first_tile += other / 256 < expert ? other % 256 : 0;
  });
  write_tiles(params, expert, total, before, num_tiles, first_tile, 0, 1);
  if (pair == 0) {
    write_totals(params, all_tiles);
  }
}

}  // namespace cake::routing
