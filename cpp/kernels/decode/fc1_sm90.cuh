// FC1 + SiTU + requantize of the decode kernel, sm_90a: bound by the weight stream.
//
// Work is the list of 32-row groups (16 features, one requantization group) of all tiles, in
// prepared order, cut into as many contiguous ranges as there are CTAs. A CTA takes one when it
// begins, and more if there are any left then. 15 warps and the load thread:
//
//   load thread    takes the ranges; 16 rows x 1792 B per stage, one contiguous bulk copy; the
//                  scales of the surrounding 128 rows (28672 B) once per 128 rows, two buffers
//   14 MMA warps   warp w owns columns [256 w, 256 w + 256). The tile's tokens (at most 8) sit
//                  dequantized in 32 registers; weights go shared memory -> registers ->
//                  dequantize -> mma; the next half group is loaded before this one is computed
//   epilogue warp  adds the 14 partial sums in warp order, SiTU, requantizes, stores
//
//   range_full / _empty   load thread <-> all other warps: the next range     (1 / 16 arrivals)
//   fc1_full[s]   load thread -> MMA warps: stage s holds data       (1 arrival + bytes)
//   fc1_empty[s]  MMA warps -> load thread: stage s was read         (14 arrivals)
//   scales_*      the same for the scale buffers
//   sums_full / sums_empty[b]  MMA warps <-> epilogue warp (14 / 1 arrivals)
//
// Every warp sees every phase of the barriers that it waits for, so that a parity wait is never
// ambiguous.
#pragma once

#include <cstdint>
#include <cuda/atomic>

#include "common/dequantize.cuh"
#include "common/pipeline.cuh"
#include "common/requantize.cuh"
#include "common/situ.cuh"
#include "decode/params.h"
#include "decode/storage.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"

namespace cake::decode {

// Loads the weights of a range. `ring` and `scales`: the next stage and scale buffer.
__device__ __forceinline__ void load_range(const fc1::Params& params, Storage& shared, Range range,
                                           RingPosition<Fc1::kStages>& ring,
                                           RingPosition<2>& scales) {
  const uint64_t policy = ptx::createpolicy_evict_first();
  int32_t expert = 0;
  for (int32_t q = range.begin; q < range.end; ++q) {
    const int32_t group = q % Fc1::kGroups;
    if (q == range.begin || group == 0) {
      expert = params.tiles[q / Fc1::kGroups].expert;
    }
    if (q == range.begin || group % 4 == 0) {
      const uint32_t full = ptx::shared_address(&shared.scales_full[scales.stage]);
      ptx::mbarrier_wait(ptx::shared_address(&shared.scales_empty[scales.stage]),
                         scales.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, Fc1::kScaleBlockBytes);
      ptx::cp_async_bulk(ptx::shared_address(shared.scales(scales.stage)),
                         params.w13_sf + (int64_t{expert} * (Fc1::kExpertRows / 128) + group / 4) *
                                             Fc1::kScaleBlockBytes,
                         Fc1::kScaleBlockBytes, full, policy);
      scales.advance();
    }
    for (int32_t half = 0; half < 2; ++half) {
      const uint32_t full = ptx::shared_address(&shared.fc1_full[ring.stage]);
      ptx::mbarrier_wait(ptx::shared_address(&shared.fc1_empty[ring.stage]), ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, Fc1::kStageBytes);
      ptx::cp_async_bulk(
          ptx::shared_address(shared.weights(ring.stage)),
          params.w13 +
              (int64_t{expert} * Fc1::kExpertRows + group * 32 + half * 16) * Fc1::kRowBytes,
          Fc1::kStageBytes, full, policy);
      ring.advance();
    }
  }
}

// One thread: takes ranges until none is left, tells the other warps each, and loads its weights.
// Returns the next stage of FC1's ring. No CTA has to wait for a range of one that has not begun:
// those that have begun take it.
__device__ __forceinline__ RingPosition<Fc1::kStages> load_fc1(const Params& params,
                                                               Storage& shared) {
  const auto ranges = static_cast<int32_t>(gridDim.x);
  RingPosition<Fc1::kStages> ring;
  RingPosition<2> scales;
  int32_t taken = atomicAdd(&params.ranges->taken, 1);
  const int32_t groups = *params.fc1.num_tiles * Fc1::kGroups;
  for (RingPosition<1> place;; place.advance()) {
    const Range range = even_range(groups, ranges, taken);
    ptx::mbarrier_wait(ptx::shared_address(&shared.range_empty), place.parity ^ 1);
    shared.range = taken < ranges ? GroupRange{range} : GroupRange{{-1, ring.stage}};
    ptx::mbarrier_arrive(ptx::shared_address(&shared.range_full));
    if (taken >= ranges) {
      return ring;
    }
    load_range(params.fc1, shared, range, ring, scales);
    taken = atomicAdd(&params.ranges->taken, 1);
  }
}

// Calls run(range) for every range of FC1 that the CTA has taken; returns the first slot of FC2's
// ring.
template <class Run>
__device__ __forceinline__ int32_t for_each_range(Storage& shared, int32_t lane, const Run& run) {
  for (RingPosition<1> place;; place.advance()) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.range_full), place.parity);
    const GroupRange range = shared.range;
    release_loaded(shared.range_empty, lane, range.begin, range.end);
    if (range.is_end()) {
      return range.end;
    }
    run(range);
  }
}

// One MMA warp's share of 16 rows: rows g and g + 8, 64 columns each, and their scales.
struct HalfGroup {
  uint4 codes[2][2];
  uint32_t scales[2];
};

// What an MMA warp keeps from one range to the next.
class Fc1MmaWarp {
 public:
  __device__ __forceinline__ Fc1MmaWarp(const fc1::Params& params, Storage& shared, int32_t warp,
                                        int32_t lane)
      : params_(params), shared_(shared), warp_(warp), lane_(lane) {}

  __device__ __forceinline__ void run(Range range) {
    if (range.begin >= range.end) {
      return;
    }
    HalfGroup first;
    HalfGroup second;
    load_tokens(range.begin);
    load(range, range.begin, 0, first);
    release_stage(range, range.begin, 0, first);
    for (int32_t q = range.begin; q < range.end; ++q) {
      if (q != range.begin && q % Fc1::kGroups == 0) {
        load_tokens(q);
      }
      load(range, q, 1, second);
      const float4 low = multiply(first);
      release_stage(range, q, 1, second);
      if (q + 1 < range.end) {
        load(range, q + 1, 0, first);
      }
      const float4 high = multiply(second);
      if (q + 1 < range.end) {
        release_stage(range, q + 1, 0, first);
      }
      ptx::mbarrier_wait(ptx::shared_address(&shared_.sums_empty[sums_.stage]), sums_.parity ^ 1);
      shared_.sums(sums_.stage)[warp_][0][lane_] = low;
      shared_.sums(sums_.stage)[warp_][1][lane_] = high;
      release(shared_.sums_full[sums_.stage], lane_);
      sums_.advance();
    }
  }

 private:
  // Dequantizes this lane's 64 columns of token `lane / 4` of the tile.
  __device__ __forceinline__ void load_tokens(int32_t q) {
    const Tile tile = params_.tiles[q / Fc1::kGroups];
    const int32_t column = lane_ / 4;
    uint4 codes[2] = {};
    uint32_t scales = 0;
    if (column < tile.count) {
      const int64_t token = params_.expert_pairs[tile.first + column] / 16;
      const uint8_t* row = params_.input + token * Fc1::kRowBytes + warp_ * 128 + lane_ % 4 * 32;
      codes[0] = reinterpret_cast<const uint4*>(row)[0];
      codes[1] = reinterpret_cast<const uint4*>(row)[1];
      scales = reinterpret_cast<const uint32_t*>(params_.input_sf + token * (Fc1::kHidden / 16) +
                                                 warp_ * 16)[lane_ % 4];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const ScalePair scale = scale_pair(scales >> (16 * i));
      dequantize8(codes[i].x, scale.first, tokens_[4 * i]);
      dequantize8(codes[i].y, scale.first, tokens_[4 * i + 1]);
      dequantize8(codes[i].z, scale.second, tokens_[4 * i + 2]);
      dequantize8(codes[i].w, scale.second, tokens_[4 * i + 3]);
    }
  }

  // Waits for 16 rows and brings this warp's share into registers.
  __device__ __forceinline__ void load(Range range, int32_t q, int32_t half, HalfGroup& out) {
    const int32_t group = q % Fc1::kGroups;
    if (half == 0 && (q == range.begin || group % 4 == 0)) {
      ptx::mbarrier_wait(ptx::shared_address(&shared_.scales_full[scales_.stage]), scales_.parity);
    }
    const int32_t g = lane_ / 4;
    const int32_t t = lane_ % 4;
    // Scale blocks of 512 bytes hold 4 columns: [row % 32][row / 32 % 4][column % 4].
    const uint8_t* scales =
        shared_.scales(scales_.stage) + (warp_ * 4 + t) * 512 + g * 16 + group % 4 * 4 + half * 256;
    out.scales[0] = *reinterpret_cast<const uint32_t*>(scales);
    out.scales[1] = *reinterpret_cast<const uint32_t*>(scales + 128);
    ptx::mbarrier_wait(ptx::shared_address(&shared_.fc1_full[ring_.stage]), ring_.parity);
    const uint8_t* row = shared_.weights(ring_.stage) + g * Fc1::kRowBytes + warp_ * 128 + t * 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      out.codes[0][i] = reinterpret_cast<const uint4*>(row)[i];
      out.codes[1][i] = reinterpret_cast<const uint4*>(row + 8 * Fc1::kRowBytes)[i];
    }
  }

  // Gives back the stage, and after the last of its rows the scale buffer, that load() has read.
  __device__ __forceinline__ void release_stage(Range range, int32_t q, int32_t half,
                                                const HalfGroup& loaded) {
    release_loaded(shared_.fc1_empty[ring_.stage], lane_, loaded.codes[0][0].x,
                   loaded.codes[0][1].x, loaded.codes[1][0].x, loaded.codes[1][1].x,
                   loaded.scales[0], loaded.scales[1]);
    if (half == 1 && (q % Fc1::kGroups % 4 == 3 || q + 1 == range.end)) {
      release_loaded(shared_.scales_empty[scales_.stage], lane_, loaded.scales[0],
                     loaded.scales[1]);
      scales_.advance();
    }
    ring_.advance();
  }

  // Partial sums over this warp's 256 columns: rows g and g + 8, tokens 2t and 2t + 1.
  __device__ __forceinline__ float4 multiply(const HalfGroup& weights) const {
    float sums[2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const ScalePair low = scale_pair(weights.scales[0] >> (16 * i));
      const ScalePair high = scale_pair(weights.scales[1] >> (16 * i));
      const uint32_t low_codes[4] = {weights.codes[0][i].x, weights.codes[0][i].y,
                                     weights.codes[0][i].z, weights.codes[0][i].w};
      const uint32_t high_codes[4] = {weights.codes[1][i].x, weights.codes[1][i].y,
                                      weights.codes[1][i].z, weights.codes[1][i].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t a[4];
        uint32_t b[4];
        dequantize8(low_codes[k], k < 2 ? low.first : low.second, a);
        dequantize8(high_codes[k], k < 2 ? high.first : high.second, b);
        const uint32_t (&token)[4] = tokens_[4 * i + k];
        ptx::mma_m16n8k16(sums[0], a[0], b[0], a[1], b[1], token[0], token[1]);
        ptx::mma_m16n8k16(sums[1], a[2], b[2], a[3], b[3], token[2], token[3]);
      }
    }
    return {sums[0][0] + sums[1][0], sums[0][1] + sums[1][1], sums[0][2] + sums[1][2],
            sums[0][3] + sums[1][3]};
  }

  const fc1::Params& params_;
  Storage& shared_;
  const int32_t warp_;
  const int32_t lane_;
  RingPosition<Fc1::kStages> ring_;
  RingPosition<2> scales_;
  RingPosition<2> sums_;
  uint32_t tokens_[8][4];  // 64 columns of one token as half2
};

// Adds the partial sums, applies SiTU and requantizes (recipe Q') 16 features of up to 8 pairs.
// `ring`: the next buffer of sums.
__device__ __forceinline__ void run_epilogue(const fc1::Params& params, Storage& shared,
                                             Range range, RingPosition<2>& ring, int32_t lane) {
  const int32_t g = lane / 4;
  Tile tile{};
  float alpha = 0;
  float q_scale = 0;
  SituConstants constants(1.0f, 1.0f);  // set at every tile
  for (int32_t q = range.begin; q < range.end; ++q) {
    const int32_t group = q % Fc1::kGroups;
    if (q == range.begin || group == 0) {
      tile = params.tiles[q / Fc1::kGroups];
      alpha = params.fc1_alpha[tile.expert] * kDequantizedSquare;  // undoes both factors
      q_scale = params.fc2_input_scale[tile.expert];
      constants =
          SituConstants(params.situ_beta[tile.expert], params.situ_linear_beta[tile.expert]);
    }
    ptx::mbarrier_wait(ptx::shared_address(&shared.sums_full[ring.stage]), ring.parity);
    float sums[2][4] = {};  // [16-row half][row g: tokens 2t, 2t+1; row g + 8: the same]
#pragma unroll
    for (int warp = 0; warp < Fc1::kMmaWarps; ++warp) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 part = shared.sums(ring.stage)[warp][half][lane];
        sums[half][0] += part.x, sums[half][1] += part.y;
        sums[half][2] += part.z, sums[half][3] += part.w;
      }
    }
    release_loaded(shared.sums_empty[ring.stage], lane, __float_as_uint(sums[0][0]),
                   __float_as_uint(sums[1][0]));
    ring.advance();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      // Rows g: up of feature 2g (half 0) and 2g + 1 (half 1); rows g + 8: their gates.
      float activation[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float up = alpha * sums[half][j];
        const float gate = alpha * sums[half][2 + j];
        activation[half] = situ(gate, up, constants);
      }
      float amax = fmaxf(fabsf(activation[0]), fabsf(activation[1]));
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, distance));
      }
      const GroupScale scale = group_scale(amax, q_scale);
      uint32_t codes = (requantize(activation[0], scale, q_scale) |
                        requantize(activation[1], scale, q_scale) << 4)
                       << (8 * (g % 4));
      codes |= __shfl_xor_sync(0xFFFFFFFFu, codes, 4);
      codes |= __shfl_xor_sync(0xFFFFFFFFu, codes, 8);
      const int32_t column = 2 * (lane % 4) + j;
      if (column < tile.count) {
        const int64_t pair = params.expert_pairs[tile.first + column];
        if (g % 4 == 0) {
          *reinterpret_cast<uint32_t*>(params.packed + pair * (Fc1::kIntermediate / 2) + group * 8 +
                                       g) = codes;
        }
        if (g == 0) {
          params.sf[pair * (Fc1::kIntermediate / 16) + group] = static_cast<uint8_t>(scale.sf);
        }
      }
    }
  }
}

// Tells all CTAs that a range is done. Called by the warp that has stored it.
__device__ __forceinline__ void count_done(int32_t& done, int32_t lane) {
  __syncwarp();
  if (lane == 0) {
    cuda::atomic_ref<int32_t, cuda::thread_scope_device>(done).fetch_add(
        1, cuda::memory_order_release);
  }
}

// Waits until all `ranges` are done.
__device__ __forceinline__ void wait_done(int32_t& done, int32_t ranges) {
  const cuda::atomic_ref<int32_t, cuda::thread_scope_device> count(done);
  while (count.load(cuda::memory_order_acquire) < ranges) {
    __nanosleep(32);
  }
}

}  // namespace cake::decode
