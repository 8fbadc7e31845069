// Routing by a stable counting sort, so that the order never depends on timing:
//
//   count    each warp counts its own contiguous run of pairs by expert, and keeps in registers
//            each pair's expert and how many of the expert the warp has before it
//   offsets  over warps, over the CTAs of the cluster, over experts
//   scatter  each pair to its expert's and warp's offset plus those before it
#pragma once

#include <cooperative_groups.h>

#include <cstdint>
#include <limits>
#include <type_traits>

#include "routing/params.cuh"

namespace cake::routing {

// Counting sort by one CTA, or by a cluster.
template <bool kCluster>
struct Sort {
  static constexpr int kCtas = kCluster ? kLargeCluster : 1;
  static constexpr int kSteps = kCluster ? 16 : 2;  // most pairs of a thread
  static constexpr int kMostPairs = kCtas * kThreads * kSteps;

  // A warp's pairs of an expert. A word holds those of kWordWarps neighbouring warps, so that an
  // expert's thread reads few words; in the end, the index in expert_pairs where they begin.
  using Count = std::conditional_t<kCluster, uint16_t, uint8_t>;
  static_assert(32 * kSteps <= std::numeric_limits<Count>::max());
  static constexpr int kCountBits = 8 * sizeof(Count);
  static constexpr int kWordWarps = 32 / kCountBits;
  static constexpr int kWords = kWarps / kWordWarps;
  static_assert(32 * kSteps * kWordWarps < 1 << 16);  // the high half of `placed`

  // Pairs in the low half, tiles in the high half: half the shuffles where 32 bits will do.
  using Offset = std::conditional_t<kCluster, uint64_t, uint32_t>;
  static constexpr int kHalfBits = 4 * sizeof(Offset);
  static_assert(kMostPairs < int64_t{1} << kHalfBits);

  struct Storage {
    uint32_t words[kWords][kExperts + 1];  // the last column is that of the empty slots
    Offset warp_sums[kWarps];
    int32_t totals[kExperts];  // pairs of the CTA; read by the whole cluster
  };
};

// The sum of the counts in a word.
template <class Count>
__device__ __forceinline__ uint32_t sum_of(uint32_t word) {
  return sizeof(Count) == 1 ? __dp4a(word, 0x01010101u, 0u) : (word & 0xFFFFu) + (word >> 16);
}

__device__ __forceinline__ uint32_t warp_sum(uint32_t value) {
  return __reduce_add_sync(0xFFFFFFFFu, value);
}

// Of both halves: no carry.
__device__ __forceinline__ uint64_t warp_sum(uint64_t value) {
  return uint64_t{warp_sum(static_cast<uint32_t>(value >> 32))} << 32 |
         warp_sum(static_cast<uint32_t>(value));
}

// The sum over the threads before this one; all threads of the CTA, one barrier.
template <class Offset>
__device__ __forceinline__ Offset exclusive_sum(Offset value, Offset (&warp_sums)[kWarps]) {
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  Offset sum = value;  // of the warp's lanes up to this one
#pragma unroll
  for (uint32_t distance = 1; distance < 32; distance *= 2) {
    const Offset lower = __shfl_up_sync(0xFFFFFFFFu, sum, distance);
    sum += lane >= distance ? lower : 0;
  }
  if (lane == 31) {
    warp_sums[warp] = sum;
  }
  __syncthreads();
  return warp_sum(lane < warp ? warp_sums[lane] : Offset{0}) + sum - value;
}

template <bool kCluster>
__device__ __forceinline__ void route(const Params& params,
                                      typename Sort<kCluster>::Storage& shared) {
  namespace cg = cooperative_groups;
  using S = Sort<kCluster>;
  using Count = typename S::Count;
  using Offset = typename S::Offset;
  const cg::cluster_group cluster = cg::this_cluster();
  const int32_t rank = kCluster ? static_cast<int32_t>(cluster.block_rank()) : 0;
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);

  // Contiguous runs: of a CTA, and of a warp, which takes `steps` of 32 pairs.
  const uint32_t cta_pairs =
      ((static_cast<uint32_t>(params.num_pairs) + S::kCtas - 1) / S::kCtas + 31) / 32 * 32;
  const auto steps = static_cast<int32_t>((cta_pairs + kThreads - 1) / kThreads);
  const int32_t cta_begin = rank * static_cast<int32_t>(cta_pairs);
  const int32_t cta_end = min(params.num_pairs, cta_begin + static_cast<int32_t>(cta_pairs));
  const int32_t first = cta_begin + warp * steps * 32 + lane;  // this thread's, then every 32nd

  uint2 ids[S::kSteps];
#pragma unroll
  for (int s = 0; s < S::kSteps; ++s) {
    ids[s] = load_id(params, first + 32 * s, s < steps ? cta_end : 0);
  }
  // While they are on their way.
  // With more than one step all warps are taken as used: no division.
  const int32_t used_warps = min(kWarps, static_cast<int32_t>(cta_pairs / 32));
  const int32_t used_words = (used_warps + S::kWordWarps - 1) / S::kWordWarps;
  if (threadIdx.x <= kExperts) {
#pragma unroll
    for (int w = 0; w < S::kWords; ++w) {
      if (w < used_words) {
        shared.words[w][threadIdx.x] = 0;
      }
    }
  }
  __syncthreads();

  uint32_t* const words = shared.words[warp / S::kWordWarps];  // of this warp
  const int32_t place = warp % S::kWordWarps;                  // in a word
  uint32_t placed[S::kSteps];  // a pair's expert; from bit 16 on, those of the expert before it
#pragma unroll
  for (int s = 0; s < S::kSteps; ++s) {
    if (s >= steps) {
      break;
    }
    const auto e = static_cast<uint32_t>(expert_of(ids[s]));
    const uint32_t same = __match_any_sync(0xFFFFFFFFu, e);
    const uint32_t ahead = __popc(same & ((1u << lane) - 1));
    Count& count = reinterpret_cast<Count*>(&words[e])[place];
    const uint32_t earlier = s > 0 ? count : 0;
    __syncwarp();
    if (ahead == 0) {
      count = static_cast<Count>(earlier + __popc(same));
    }
    __syncwarp();
    placed[s] = (earlier + ahead) << 16 | e;
  }
  __syncthreads();

  const int32_t expert = static_cast<int32_t>(threadIdx.x);
  uint32_t counts[S::kWords];  // of this thread's expert
  int32_t total = 0;
#pragma unroll
  for (int w = 0; w < S::kWords; ++w) {
    counts[w] = expert < kExperts && w < used_words ? shared.words[w][expert] : 0;
  }
#pragma unroll
  for (int w = 0; w < S::kWords; ++w) {
    total += static_cast<int32_t>(sum_of<Count>(counts[w]));
  }
  // Pairs of the earlier warps of the word.
  const uint32_t earlier_warps = (1u << place * S::kCountBits) - 1;
#pragma unroll
  for (int s = 0; s < S::kSteps; ++s) {
    if (s >= steps) {
      break;
    }
    placed[s] += sum_of<Count>(words[placed[s] & 0xFFFFu] & earlier_warps) << 16;
  }
  int32_t before = 0;  // pairs of this expert in earlier CTAs
  if constexpr (kCluster) {
    if (expert < kExperts) {
      shared.totals[expert] = total;
    }
    cluster.sync();
    total = 0;
    if (expert < kExperts) {
#pragma unroll
      for (int r = 0; r < S::kCtas; ++r) {
        const int32_t pairs = *cluster.map_shared_rank(&shared.totals[expert], r);
        before += r < rank ? pairs : 0;
        total += pairs;
      }
    }
  }
  const int32_t num_tiles = tiles_of(params, total);
  const Offset offset = exclusive_sum<Offset>(
      static_cast<Offset>(num_tiles) << S::kHalfBits | static_cast<uint32_t>(total),
      shared.warp_sums);
  const auto first_tile = static_cast<int32_t>(offset >> S::kHalfBits);
  const auto first_pair = static_cast<int32_t>(offset - (offset >> S::kHalfBits << S::kHalfBits));
  if (expert < kExperts) {
    uint32_t position = static_cast<uint32_t>(first_pair + before);
#pragma unroll
    for (int w = 0; w < S::kWords; ++w) {
      if (w >= used_words) {
        break;
      }
      // A cluster's threads keep so many pairs that there are no registers for the counts too.
      const uint32_t word = kCluster ? shared.words[w][expert] : counts[w];
      shared.words[w][expert] = position;
      position += sum_of<Count>(word);
    }
  }
  __syncthreads();
#pragma unroll
  for (int s = 0; s < S::kSteps; ++s) {
    const uint32_t e = placed[s] & 0xFFFFu;
    if (s < steps && e < kExperts) {
      params.expert_pairs[words[e] + (placed[s] >> 16)] = first + 32 * s;
    }
  }
  if (expert < kExperts) {
    write_tiles(params, expert, total, first_pair, num_tiles, first_tile, rank, S::kCtas);
  }
  if (rank == 0 && expert == kExperts - 1) {
    write_totals(params, first_tile + num_tiles);
  }
  if constexpr (kCluster) {
    cluster.sync();  // no CTA leaves while another may still read its totals
  }
}

}  // namespace cake::routing
