// Routing and input quantization in one launch: independent blocks of one grid.
//
// The first cluster (one CTA, or kLargeCluster CTAs for many tokens) sorts the pairs by expert,
// token and slot, and cuts each expert's pairs into tiles. The order is that of a stable counting
// sort, so it never depends on timing:
//
//   count    each warp counts its own contiguous run of pairs           counts[warp][expert]
//   offsets  over warps, over the CTAs of the cluster, over experts
//   scatter  each warp walks its run again and places its pairs
//
// Up to kFewPairs pairs each thread counts those before its own instead, without any barrier but
// two.
//
// The other CTAs quantize tokens, a group of 16 a thread at a time. Everyone waits for the
// predecessor before the first read and releases the dependents at once: they wait for the end of
// this grid anyway.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>
#include <cub/block/block_scan.cuh>

#include "common/dequantize.cuh"
#include "common/quantize_group.cuh"
#include "common/tile.h"
#include "ptx/pdl.cuh"

namespace cake::routing {

inline constexpr int kThreads = 1024;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kExperts = 896;
inline constexpr int kLargeCluster = 8;
inline constexpr int kFewPairs = 128;

struct Params {
  const void* __restrict__ topk_ids;  // int32 or int64 [P]
  bool ids_are_int64;
  int32_t num_pairs;                   // P
  int32_t tile_pairs;                  // most pairs of a tile
  int32_t* __restrict__ expert_pairs;  // out [P] pair ids by expert, token, slot
  Tile* __restrict__ tiles;            // out, by expert
  int32_t* __restrict__ num_tiles;     // out [1]
  int32_t* __restrict__ work_counter;  // out [1] or null: seeded with 0

  const uint16_t* __restrict__ input;     // bf16 [T, 16 * groups], input_stride elements a row
  const float* __restrict__ input_scale;  // [1]
  uint2* __restrict__ packed;             // out [T, groups]
  uint8_t* __restrict__ sf;               // out [T, groups]
  // Out or null: half [T, 16 * groups], dequantized, in the order of common/grouped_mma_sm90.cuh.
  uint32_t* __restrict__ halves;
  int64_t input_stride;  // elements
  int32_t num_groups;    // T * groups
  int32_t groups;        // of a token
};

// Pairs in the low half, tiles in the high half.
using Scan = cub::BlockScan<uint64_t, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;

struct FewStorage {
  int4 experts[kFewPairs / 4];  // of the pairs, kExperts for an empty slot
  int4 tiles[kFewPairs / 4];    // expert * 256, plus its number of tiles at its first pair
};

struct Storage {
  uint16_t counts[kWarps][kExperts];  // of a warp, then its offset within the CTA's pairs
  int32_t totals[kExperts];           // of the CTA; read by the whole cluster
  int32_t bases[kExperts];            // where the CTA's pairs of an expert begin
  Scan::TempStorage scan;
};

// The expert of a pair, or -1 for an empty slot or a pair beyond the end.
__device__ __forceinline__ int32_t expert_of(const Params& params, int32_t pair, int32_t end) {
  if (pair >= end) {
    return -1;
  }
  const int64_t id = params.ids_are_int64 ? static_cast<const int64_t*>(params.topk_ids)[pair]
                                          : static_cast<const int32_t*>(params.topk_ids)[pair];
  return id >= 0 && id < kExperts ? static_cast<int32_t>(id) : -1;
}

// Calls place(expert, pair, lanes with this expert) for the warp's run of pairs, 32 at a time.
template <class Place>
__device__ __forceinline__ void for_each_pair(const Params& params, int32_t begin, int32_t end,
                                              const Place& place) {
  for (int32_t first = begin; first < end; first += 32) {
    const int32_t pair = first + static_cast<int32_t>(threadIdx.x % 32);
    const int32_t expert = expert_of(params, pair, end);
    place(expert, pair, __match_any_sync(0xFFFFFFFFu, expert));
  }
}

// Writes the tiles of an expert: `size` pairs and the first `longer` one more.
__device__ __forceinline__ void write_tiles(const Params& params, int32_t expert, int32_t pairs,
                                            int32_t first_pair, int32_t num_tiles,
                                            int32_t first_tile, int32_t begin, int32_t step) {
  const int32_t size = num_tiles > 0 ? pairs / num_tiles : 0;
  const int32_t longer = pairs - size * num_tiles;
  for (int32_t i = begin; i < num_tiles; i += step) {
    params.tiles[first_tile + i] = {expert, first_pair + i * size + min(i, longer),
                                    size + (i < longer ? 1 : 0), 0};
  }
}

__device__ __forceinline__ void write_totals(const Params& params, int32_t num_tiles) {
  *params.num_tiles = num_tiles;
  if (params.work_counter != nullptr) {
    *params.work_counter = 0;
  }
}

// The same as route, one pair a thread of the first warps.
__device__ __forceinline__ void route_few(const Params& params, FewStorage& shared) {
  const auto pair = static_cast<int32_t>(threadIdx.x);
  int32_t expert = kExperts;
  if (pair < kFewPairs) {
    const int32_t found = expert_of(params, pair, params.num_pairs);
    expert = found >= 0 ? found : kExperts;
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
    num_tiles = first ? (total + params.tile_pairs - 1) / params.tile_pairs : 0;
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

__device__ __forceinline__ void route(const Params& params, Storage& shared) {
  namespace cg = cooperative_groups;
  const cg::cluster_group cluster = cg::this_cluster();
  const int32_t rank = static_cast<int32_t>(cluster.block_rank());
  const int32_t ranks = static_cast<int32_t>(cluster.num_blocks());
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);

  // Contiguous runs of whole 32-pair steps: by CTA, then by warp.
  const int32_t runs = ranks * kWarps;
  const int32_t run_pairs = ((params.num_pairs + runs - 1) / runs + 31) / 32 * 32;
  const int32_t begin = min(params.num_pairs, (rank * kWarps + warp) * run_pairs);
  const int32_t end = min(params.num_pairs, begin + run_pairs);

  const int32_t used_warps = min(kWarps, (params.num_pairs + run_pairs - 1) / run_pairs);
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < used_warps * kExperts / 2;
       i += kThreads) {
    reinterpret_cast<uint32_t*>(shared.counts)[i] = 0;
  }
  __syncthreads();
  for_each_pair(params, begin, end, [&](int32_t expert, int32_t, uint32_t same) {
    if (expert >= 0 && lane == __ffs(same) - 1) {
      shared.counts[warp][expert] += static_cast<uint16_t>(__popc(same));
    }
    __syncwarp();
  });
  __syncthreads();

  const int32_t expert = static_cast<int32_t>(threadIdx.x);
  if (expert < kExperts) {
    int32_t sum = 0;
    for (int32_t w = 0; w < used_warps; ++w) {
      const int32_t count = shared.counts[w][expert];
      shared.counts[w][expert] = static_cast<uint16_t>(sum);
      sum += count;
    }
    shared.totals[expert] = sum;
  }
  cluster.sync();
  int32_t before = 0;  // pairs of this expert in earlier CTAs
  int32_t total = 0;   // in all CTAs
  if (expert < kExperts) {
    for (int32_t r = 0; r < ranks; ++r) {
      const int32_t count = *cluster.map_shared_rank(&shared.totals[expert], r);
      before += r < rank ? count : 0;
      total += count;
    }
  }
  const int32_t own_tiles = (total + params.tile_pairs - 1) / params.tile_pairs;
  uint64_t offset = 0;
  uint64_t sum = 0;
  Scan(shared.scan)
      .ExclusiveSum(static_cast<uint64_t>(own_tiles) << 32 | static_cast<uint32_t>(total), offset,
                    sum);
  const int32_t first_pair = static_cast<int32_t>(offset & 0xFFFFFFFFu);
  const int32_t first_tile = static_cast<int32_t>(offset >> 32);
  if (expert < kExperts) {
    shared.bases[expert] = first_pair + before;
    write_tiles(params, expert, total, first_pair, own_tiles, first_tile, rank, ranks);
  }
  if (rank == 0 && threadIdx.x == 0) {
    write_totals(params, static_cast<int32_t>(sum >> 32));
  }
  __syncthreads();
  for_each_pair(params, begin, end, [&](int32_t e, int32_t pair, uint32_t same) {
    const int32_t ahead = __popc(same & ((1u << lane) - 1));
    if (e >= 0) {
      params.expert_pairs[shared.bases[e] + shared.counts[warp][e] + ahead] = pair;
    }
    __syncwarp();
    if (e >= 0 && ahead == 0) {
      shared.counts[warp][e] += static_cast<uint16_t>(__popc(same));
    }
    __syncwarp();
  });
  cluster.sync();  // no CTA leaves while another may still read its totals
}

// Dequantizes a group into its 128-column unit of a row.
__device__ __forceinline__ void store_halves(uint32_t* row, int32_t group,
                                             const QuantizedGroup& quantized) {
  const __half2 scale = scale_pair(quantized.sf).first;
  uint32_t* const words = row + group / 8 * 64 + group % 2 * 32 + group % 8 / 2;
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    uint32_t pairs[4];
    dequantize8(v == 0 ? quantized.codes.x : quantized.codes.y, scale, pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[(4 * v + i) * 4] = pairs[i];
    }
  }
}

// Groups first, first + step, .. of the input; the next one is on its way while one is quantized.
template <bool kAligned16>
__device__ __forceinline__ void quantize(const Params& params, int32_t first, int32_t step) {
  const float q = *params.input_scale;
  const auto load = [&](int32_t index) -> GroupWords {
    return index < params.num_groups
               ? load_group<kAligned16>(params.input + index / params.groups * params.input_stride +
                                        index % params.groups * 16)
               : GroupWords{};
  };
  GroupWords next = load(first);
  for (int32_t index = first; index < params.num_groups; index += step) {
    const GroupWords words = next;
    next = load(index + step);
    const QuantizedGroup out = quantize_group(words, q);
    params.packed[index] = out.codes;
    params.sf[index] = out.sf;
    if (params.halves != nullptr) {
      store_halves(params.halves + int64_t{index / params.groups} * params.groups * 8,
                   index % params.groups, out);
    }
  }
}

template <bool kAligned16>
__global__ void __launch_bounds__(kThreads, 1)
    cake_route_quantize(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) uint8_t routing_storage[];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const auto cluster_size = static_cast<int32_t>(cooperative_groups::this_cluster().num_blocks());
  if (static_cast<int32_t>(blockIdx.x) < cluster_size) {
    if (params.num_pairs <= kFewPairs) {
      route_few(params, *reinterpret_cast<FewStorage*>(routing_storage));
    } else {
      route(params, *reinterpret_cast<Storage*>(routing_storage));
    }
  } else {
    const auto block = static_cast<int32_t>(blockIdx.x) - cluster_size;
    const auto blocks = static_cast<int32_t>(gridDim.x) - cluster_size;
    quantize<kAligned16>(params, block * kThreads + static_cast<int32_t>(threadIdx.x),
                         blocks * kThreads);
  }
}

}  // namespace cake::routing
