// What brings items and operands of FC2 for many pairs per expert, sm_90a: the load thread and the
// unpack warps. Chart: prefill_sm90.cuh.
#pragma once

#include <cstdint>

#include "common/dequantize.cuh"
#include "common/pipeline.cuh"
#include "common/work_pool.cuh"
#include "fc2/params.h"
#include "fc2/prefill_config_sm90.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"

namespace cake::fc2 {

// A CTA's items in order: its range and its claims. Where most experts have more pairs than an item
// holds, tiles or their parts in turn instead: those of an expert then run at the same time and
// fetch its weights once.
class PrefillCursor {
 public:
  __device__ __forceinline__ PrefillCursor(const Params& params, int32_t num_tiles)
      : cursor_(params.tiles, num_tiles, params.num_blocks, params.pool, params.work_counter),
        tiles_(params.tiles),
        parts_(params.tile_parts),
        num_parts_(num_tiles * params.tile_parts),
        in_turn_(params.tile_parts > 1 || num_tiles > Prefill::kMostTilesCut),
        num_blocks_(params.num_blocks),
        part_(static_cast<int32_t>(blockIdx.x)) {}

  // After the end it may be called again.
  __device__ __forceinline__ TileBlocks next() {
    if (!in_turn_) {
      return cursor_.next();
    }
    while (part_ < num_parts_) {
      Tile tile = load_tile(tiles_ + part_ / parts_);
      const Range pairs = even_range(tile.count, parts_, part_ % parts_);
      part_ += static_cast<int32_t>(gridDim.x);
      if (pairs.begin < pairs.end) {
        tile.first += pairs.begin;
        tile.count = pairs.end - pairs.begin;
        return {tile, 0, num_blocks_};
      }
    }
    return {};
  }

 private:
  WorkCursor cursor_;
  const Tile* const tiles_;
  const int32_t parts_;  // of a tile
  const int32_t num_parts_;
  const bool in_turn_;
  const int32_t num_blocks_;
  int32_t part_;  // the next one in turn
};

__device__ __forceinline__ void load_thread(const Params& params, PrefillStorage& shared) {
  const uint64_t policy = ptx::createpolicy_evict_first();
  RingPosition<Prefill::kWorks> published;
  const auto publish = [&](const TileBlocks& work) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.work_empty[published.stage]),
                       published.parity ^ 1);
    shared.work[published.stage] = work;
    ptx::mbarrier_arrive(ptx::shared_address(&shared.work_full[published.stage]));
    published.advance();
  };
  PrefillCursor cursor(params, load_num_tiles(params.num_tiles));
  RingPosition<Prefill::kStages> ring;
  TileBlocks work = cursor.next();
  TileBlocks next = cursor.next();
  publish(work);
#pragma unroll 1
  while (work.tile.count > 0) {
    publish(next);  // before this item's blocks, which cannot all pass before it is taken
    TileBlocks after{};
    const int64_t first = int64_t{work.tile.expert} * Prefill::kExpertBlocks + params.first_block;
#pragma unroll 1
    for (int32_t block = work.begin; block < work.end; ++block) {
      if (block + 1 == work.end) {  // looked up while this block waits for its stage
        after = cursor.next();
      }
      PrefillStorage::Stage& stage = shared.stages[ring.stage];
      const uint32_t full = ptx::shared_address(&shared.full[ring.stage]);
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, Prefill::kWeightBytes + Prefill::kScaleBytes);
      ptx::cp_async_bulk(ptx::shared_address(stage.codes),
                         params.w2 + (first + block) * Prefill::kWeightBytes, Prefill::kWeightBytes,
                         full, policy);
      ptx::cp_async_bulk(ptx::shared_address(stage.scales),
                         params.w2_sf + (first + block) * Prefill::kScaleBytes,
                         Prefill::kScaleBytes, full, policy);
      ring.advance();
    }
    work = next;
    next = after;
  }
}

// Dequantizes words v, v + 4, v + 8, v + 12 of unit k of a pair into four chunks of row n.
__device__ __forceinline__ void unpack_words(const PackedPair& packed, int32_t k, int32_t v,
                                             grouped_mma::PairUnit<Prefill::kTilePairs>& unit,
                                             int32_t n) {
  const auto* codes = reinterpret_cast<const uint32_t*>(packed.codes + k * 64) + v;
  const uint2 eight = reinterpret_cast<const uint2*>(packed.scales)[k];
  // The scales of v's half of columns 32t .. 32t + 31, t = 0 .. 3: every other byte.
  const uint32_t scales = __byte_perm(eight.x, eight.y, v < 2 ? 0x6420u : 0x7531u);
  const ScalePair pairs[2] = {scale_pair(scales), scale_pair(scales >> 16)};
  uint32_t halves[4][4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    dequantize8(codes[4 * t], t % 2 == 0 ? pairs[t / 2].first : pairs[t / 2].second, halves[t]);
  }
  uint8_t* const row = unit.blocks[v / 2] + n * 128;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<uint4*>(row + ((v % 2 * 4 + i) ^ (n % 8)) * 16) =
        make_uint4(halves[0][i], halves[1][i], halves[2][i], halves[3][i]);
  }
}

// Four threads of a warp share a pair: thread `thread` fetches and unpacks a quarter of pairs
// thread / 4 + 24 i. The item's description goes with its first unit; the next item is then taken
// up.
__device__ __forceinline__ void unpack_warps(const Params& params, PrefillStorage& shared,
                                             int32_t thread) {
  constexpr int kStep = Prefill::kUnpackWarps * 32 / 4;
  constexpr int kPasses = (Prefill::kTilePairs + kStep - 1) / kStep;
  const int32_t v = thread % 4;
  const int32_t first = thread / 4;
  int32_t pairs[kPasses];  // of the item to be fetched, -1 beyond its last
  const auto look_up = [&](const Tile& tile) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int32_t n = first + kStep * i;
      pairs[i] = n < tile.count ? params.expert_pairs[tile.first + n] : -1;
    }
  };
  const auto fetch = [&]() {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      if (pairs[i] >= 0) {
        PackedPair& packed = shared.packed[first + kStep * i];
        const uint8_t* const codes = params.input + pairs[i] * Prefill::kRowBytes + v * 16;
#pragma unroll
        for (int k = 0; k < Prefill::kUnits; ++k) {
          ptx::cp_async_16(ptx::shared_address(packed.codes) + v * 16 + k * 64, codes + k * 64);
        }
        if (v < Prefill::kUnits) {
          ptx::cp_async_8(ptx::shared_address(packed.scales) + v * 8,
                          params.input_sf + pairs[i] * (Prefill::kIntermediate / 16) + v * 8);
        }
      }
    }
  };
  RingPosition<Prefill::kWorks> taken;
  const auto take = [&]() -> TileBlocks {
    ptx::mbarrier_wait(ptx::shared_address(&shared.work_full[taken.stage]), taken.parity);
    const TileBlocks work = shared.work[taken.stage];
    release_loaded(shared.work_empty[taken.stage], thread % 32, work.tile.expert, work.tile.first,
                   work.tile.count, work.begin, work.end);
    taken.advance();
    return work;
  };
  RingPosition<Prefill::kSlots> ring;
  int32_t uses = 0;
  TileBlocks work = take();
  look_up(work.tile);
  fetch();
  for (uint32_t index = 0;; ++index) {
    const Tile tile = work.tile;
    PrefillItem& item = shared.items[index % 3];
#pragma unroll 1
    for (int32_t k = 0; k < Prefill::kUnits; ++k) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.pairs_empty[ring.stage]), ring.parity ^ 1);
      if (k == 0) {
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          const int32_t n = first + kStep * i;
          if (v == 0 && n < Prefill::kTilePairs) {
            item.pair_ids[n] = pairs[i];
          }
        }
        if (thread == 0) {
          item.count = tile.count;
          item.unit_use = index * Prefill::kUnits;
          item.block = work.begin;
          item.first_use = uses;
          uses += work.end - work.begin;
          item.end_use = uses;
          item.alpha = tile.count > 0 ? params.fc2_alpha[tile.expert] * kDequantizedSquare : 0.0f;
        }
        if (tile.count > 0) {
          work = take();
          look_up(work.tile);
        }
        ptx::cp_async_wait_all();
        __syncwarp();
      }
#pragma unroll 1
      for (int32_t n = first; n < tile.count; n += kStep) {
        unpack_words(shared.packed[n], k, v, shared.pairs[ring.stage], n);
      }
      ptx::fence_proxy_async();
      release(shared.pairs_full[ring.stage], thread % 32);
      ring.advance();
      if (tile.count == 0) {  // the description says so
        return;
      }
    }
    fetch();
  }
}

}  // namespace cake::fc2
