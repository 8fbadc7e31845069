// FC1 + SiTU + requantize for few pairs per expert, sm_90a: bound by the weight stream.
//
// Work is the list of 32-row groups (16 features, one requantization group) of all tiles, in
// prepared order, cut into one contiguous range per CTA; one CTA per SM. 16 warps:
//
//   load warp      16 rows x 1792 B per stage, one contiguous bulk copy; the scales of the
//                  surrounding 128 rows (28672 B) once per 128 rows, two buffers
//   14 MMA warps   warp w owns columns [256 w, 256 w + 256). The tile's tokens (at most 8) sit
//                  dequantized in 32 registers; weights go shared memory -> registers ->
//                  dequantize -> mma; the next half group is loaded before this one is computed
//   epilogue warp  adds the 14 partial sums in warp order, SiTU, requantizes, stores
//
//   full[s]   load -> MMA warps: stage s holds data       (1 arrival + bytes)
//   empty[s]  MMA warps -> load: stage s was read         (14 arrivals)
//   scales_*  the same for the scale buffers
//   sums_full / sums_empty[b]  MMA warps <-> epilogue warp (14 / 1 arrivals)
//
// Every MMA warp sees every phase of every barrier, so that a parity wait is never ambiguous.
// Waits for routing before the first read (it needs the tile list), then releases the dependents.
#pragma once

#include <cstdint>

#include "common/dequantize.cuh"
#include "common/pipeline.cuh"
#include "common/requantize.cuh"
#include "common/situ.cuh"
#include "fc1/params.h"
#include "ptx/bulk_copy.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/pdl.cuh"

namespace cake::fc1 {

struct Decode {
  static constexpr int kHidden = 3584;
  static constexpr int kIntermediate = 384;
  static constexpr int kRowBytes = kHidden / 2;
  static constexpr int kExpertRows = 2 * kIntermediate;
  static constexpr int kScaleBlockBytes = 128 * kHidden / 16;  // scales of 128 rows
  static constexpr int kGroups = kExpertRows / 32;             // 32-row groups of a tile
  static constexpr int kTilePairs = 8;                         // N of the MMA
  static constexpr int kMmaWarps = kHidden / 256;
  static constexpr int kThreads = (kMmaWarps + 2) * 32;
  static constexpr int kStages = 5;
  static constexpr int kStageRows = 16;
  static constexpr int kStageBytes = kStageRows * kRowBytes;
};

struct DecodeStorage {
  uint8_t weights[Decode::kStages][Decode::kStageBytes];
  uint8_t scales[2][Decode::kScaleBlockBytes];
  float4 sums[2][Decode::kMmaWarps][2][32];  // [buffer][warp][16-row half][lane]
  uint64_t full[Decode::kStages];
  uint64_t empty[Decode::kStages];
  uint64_t scales_full[2];
  uint64_t scales_empty[2];
  uint64_t sums_full[2];
  uint64_t sums_empty[2];
};
static_assert(sizeof(DecodeStorage) <= 232448, "shared memory exceeds 227 KB");

__device__ __forceinline__ void load_warp(const Params& params, DecodeStorage& shared,
                                          Range range) {
  const uint64_t policy = ptx::createpolicy_evict_first();
  RingPosition<Decode::kStages> ring;
  RingPosition<2> scales;
  int32_t expert = 0;
  for (int32_t q = range.begin; q < range.end; ++q) {
    const int32_t group = q % Decode::kGroups;
    if (q == range.begin || group == 0) {
      expert = params.tiles[q / Decode::kGroups].expert;
    }
    if (q == range.begin || group % 4 == 0) {
      const uint32_t full = ptx::shared_address(&shared.scales_full[scales.stage]);
      ptx::mbarrier_wait(ptx::shared_address(&shared.scales_empty[scales.stage]),
                         scales.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, Decode::kScaleBlockBytes);
      ptx::cp_async_bulk(
          ptx::shared_address(shared.scales[scales.stage]),
          params.w13_sf + (int64_t{expert} * (Decode::kExpertRows / 128) + group / 4) *
                              Decode::kScaleBlockBytes,
          Decode::kScaleBlockBytes, full, policy);
      scales.advance();
    }
    for (int32_t half = 0; half < 2; ++half) {
      const uint32_t full = ptx::shared_address(&shared.full[ring.stage]);
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, Decode::kStageBytes);
      ptx::cp_async_bulk(
          ptx::shared_address(shared.weights[ring.stage]),
          params.w13 +
              (int64_t{expert} * Decode::kExpertRows + group * 32 + half * 16) * Decode::kRowBytes,
          Decode::kStageBytes, full, policy);
      ring.advance();
    }
  }
}

// One MMA warp's share of 16 rows: rows g and g + 8, 64 columns each, and their scales.
struct HalfGroup {
  uint4 codes[2][2];
  uint32_t scales[2];
};

class MmaWarp {
 public:
  __device__ __forceinline__ MmaWarp(const Params& params, DecodeStorage& shared, Range range,
                                     int32_t warp, int32_t lane)
      : params_(params), shared_(shared), range_(range), warp_(warp), lane_(lane) {}

  __device__ __forceinline__ void run() {
    if (range_.begin >= range_.end) {
      return;
    }
    RingPosition<2> sums;
    HalfGroup first;
    HalfGroup second;
    load_tokens(range_.begin);
    load(range_.begin, 0, first);
    release_stage(range_.begin, 0, first);
    for (int32_t q = range_.begin; q < range_.end; ++q) {
      if (q != range_.begin && q % Decode::kGroups == 0) {
        load_tokens(q);
      }
      load(q, 1, second);
      const float4 low = multiply(first);
      release_stage(q, 1, second);
      if (q + 1 < range_.end) {
        load(q + 1, 0, first);
      }
      const float4 high = multiply(second);
      if (q + 1 < range_.end) {
        release_stage(q + 1, 0, first);
      }
      ptx::mbarrier_wait(ptx::shared_address(&shared_.sums_empty[sums.stage]), sums.parity ^ 1);
      shared_.sums[sums.stage][warp_][0][lane_] = low;
      shared_.sums[sums.stage][warp_][1][lane_] = high;
      release(shared_.sums_full[sums.stage], lane_);
      sums.advance();
    }
  }

 private:
  // Dequantizes this lane's 64 columns of token `lane / 4` of the tile.
  __device__ __forceinline__ void load_tokens(int32_t q) {
    const Tile tile = params_.tiles[q / Decode::kGroups];
    const int32_t column = lane_ / 4;
    uint4 codes[2] = {};
    uint32_t scales = 0;
    if (column < tile.count) {
      const int64_t token = params_.expert_pairs[tile.first + column] / 16;
      const uint8_t* row = params_.input + token * Decode::kRowBytes + warp_ * 128 + lane_ % 4 * 32;
      codes[0] = reinterpret_cast<const uint4*>(row)[0];
      codes[1] = reinterpret_cast<const uint4*>(row)[1];
      scales = reinterpret_cast<const uint32_t*>(params_.input_sf + token * (Decode::kHidden / 16) +
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
  __device__ __forceinline__ void load(int32_t q, int32_t half, HalfGroup& out) {
    const int32_t group = q % Decode::kGroups;
    if (half == 0 && (q == range_.begin || group % 4 == 0)) {
      if (q != range_.begin) {
        scales_.advance();
      }
      ptx::mbarrier_wait(ptx::shared_address(&shared_.scales_full[scales_.stage]), scales_.parity);
    }
    const int32_t g = lane_ / 4;
    const int32_t t = lane_ % 4;
    // Scale blocks of 512 bytes hold 4 columns: [row % 32][row / 32 % 4][column % 4].
    const uint8_t* scales =
        shared_.scales[scales_.stage] + (warp_ * 4 + t) * 512 + g * 16 + group % 4 * 4 + half * 256;
    out.scales[0] = *reinterpret_cast<const uint32_t*>(scales);
    out.scales[1] = *reinterpret_cast<const uint32_t*>(scales + 128);
    ptx::mbarrier_wait(ptx::shared_address(&shared_.full[ring_.stage]), ring_.parity);
    const uint8_t* row =
        shared_.weights[ring_.stage] + g * Decode::kRowBytes + warp_ * 128 + t * 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      out.codes[0][i] = reinterpret_cast<const uint4*>(row)[i];
      out.codes[1][i] = reinterpret_cast<const uint4*>(row + 8 * Decode::kRowBytes)[i];
    }
  }

  // Gives back the stage, and after the last of its rows the scale buffer, that load() has read.
  __device__ __forceinline__ void release_stage(int32_t q, int32_t half, const HalfGroup& loaded) {
    release_loaded(shared_.empty[ring_.stage], lane_, loaded.codes[0][0].x, loaded.codes[0][1].x,
                   loaded.codes[1][0].x, loaded.codes[1][1].x, loaded.scales[0], loaded.scales[1]);
    if (half == 1 && (q % Decode::kGroups % 4 == 3 || q + 1 == range_.end)) {
      release_loaded(shared_.scales_empty[scales_.stage], lane_, loaded.scales[0],
                     loaded.scales[1]);
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

  const Params& params_;
  DecodeStorage& shared_;
  const Range range_;
  const int32_t warp_;
  const int32_t lane_;
  RingPosition<Decode::kStages> ring_;
  RingPosition<2> scales_;
  uint32_t tokens_[8][4];  // 64 columns of one token as half2
};

// Adds the partial sums, applies SiTU and requantizes (recipe Q') 16 features of up to 8 pairs.
__device__ __forceinline__ void epilogue_warp(const Params& params, DecodeStorage& shared,
                                              Range range, int32_t lane) {
  const int32_t g = lane / 4;
  RingPosition<2> ring;
  Tile tile{};
  float alpha = 0;
  float q_scale = 0;
  SituConstants constants(1.0f, 1.0f);  // set at every tile
  for (int32_t q = range.begin; q < range.end; ++q) {
    const int32_t group = q % Decode::kGroups;
    if (q == range.begin || group == 0) {
      tile = params.tiles[q / Decode::kGroups];
      alpha = params.fc1_alpha[tile.expert] * kDequantizedSquare;  // undoes both factors
      q_scale = params.fc2_input_scale[tile.expert];
      constants =
          SituConstants(params.situ_beta[tile.expert], params.situ_linear_beta[tile.expert]);
    }
    ptx::mbarrier_wait(ptx::shared_address(&shared.sums_full[ring.stage]), ring.parity);
    float sums[2][4] = {};  // [16-row half][row g: tokens 2t, 2t+1; row g + 8: the same]
#pragma unroll
    for (int warp = 0; warp < Decode::kMmaWarps; ++warp) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 part = shared.sums[ring.stage][warp][half][lane];
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
          *reinterpret_cast<uint32_t*>(params.packed + pair * (Decode::kIntermediate / 2) +
                                       group * 8 + g) = codes;
        }
        if (g == 0) {
          params.sf[pair * (Decode::kIntermediate / 16) + group] = static_cast<uint8_t>(scale.sf);
        }
      }
    }
  }
}

__global__ void __launch_bounds__(Decode::kThreads, 1)
    cake_fc1_decode_sm90(const __grid_constant__ Params params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  __trap();  // the plan never picks this kernel elsewhere
#else
  extern __shared__ __align__(128) uint8_t fc1_decode_storage[];
  DecodeStorage& shared = *reinterpret_cast<DecodeStorage*>(fc1_decode_storage);
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Decode::kStages; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[s]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[s]), Decode::kMmaWarps * kWarpArrivals);
    }
    for (int b = 0; b < 2; ++b) {
      ptx::mbarrier_init(ptx::shared_address(&shared.scales_full[b]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.scales_empty[b]),
                         Decode::kMmaWarps * kWarpArrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.sums_full[b]),
                         Decode::kMmaWarps * kWarpArrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.sums_empty[b]), kWarpArrivals);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  // Of 32-row groups; group q belongs to tile q / kGroups.
  const Range range = cta_range(*params.num_tiles * Decode::kGroups);
  if (warp < Decode::kMmaWarps) {
    MmaWarp(params, shared, range, warp, lane).run();
  } else if (warp == Decode::kMmaWarps) {
    epilogue_warp(params, shared, range, lane);
  } else if (ptx::elect_sync()) {
    load_warp(params, shared, range);
  }
#endif
}

}  // namespace cake::fc1
