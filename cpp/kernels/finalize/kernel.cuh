// Weighted sum of a token's expert rows (common/slots.cuh). One thread has 8 columns of one token;
// the threads of all tokens are numbered through, so that none idles at any number of columns.
#pragma once

#include <cstdint>

#include "common/bf16_pair.cuh"
#include "common/slots.cuh"
#include "ptx/pdl.cuh"

namespace cake::finalize {

inline constexpr int kThreads = 64;
inline constexpr int kColumns = 8;  // of a thread: 16 bytes

struct Params {
  Slots slots;
  const uint16_t* __restrict__ rows;  // bf16 [P, row_columns]
  uint16_t* __restrict__ output;      // bf16 [T, output_stride]
  int32_t num_tokens;
  int32_t columns;        // of the rows and of the part of the output; a multiple of 128
  int32_t output_stride;  // elements
};

__global__ void __launch_bounds__(kThreads) cake_finalize(const __grid_constant__ Params params) {
  ptx::griddepcontrol_launch_dependents();
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t token_threads = params.columns / kColumns;  // at least 16
  const int32_t thread = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  const int32_t token = thread / token_threads;
  const int32_t column = thread % token_threads * kColumns;
  // A warp has threads of two tokens at most: lanes 0 .. 15 look up the slots of the first, the
  // others those of the second.
  const int32_t first_token = (thread - lane) / token_threads;
  const int32_t looked_up = first_token + lane / kTopK;
  const RoutedSlot own = looked_up < params.num_tokens
                             ? RoutedSlot(params.slots, looked_up * kTopK + lane % kTopK)
                             : RoutedSlot();
  const TokenSlots slots(own, (token - first_token) * kTopK);
  ptx::griddepcontrol_wait();
  if (token >= params.num_tokens) {
    return;
  }
  const uint16_t* row = params.rows + int64_t{token} * kTopK * params.columns + column;
  uint4 values[kTopK];
#pragma unroll
  for (int slot = 0; slot < kTopK; ++slot) {
    values[slot] = slots.is_used(slot)
                       ? *reinterpret_cast<const uint4*>(row + int64_t{slot} * params.columns)
                       : uint4{};
  }
  float sums[kColumns] = {};
#pragma unroll
  for (int slot = 0; slot < kTopK; ++slot) {
    if (slots.is_used(slot)) {
      const uint32_t words[4] = {values[slot].x, values[slot].y, values[slot].z, values[slot].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        add_row(slots.weights[slot], words[i], sums[2 * i], sums[2 * i + 1]);
      }
    }
  }
  *reinterpret_cast<uint4*>(params.output + int64_t{token} * params.output_stride + column) =
      make_uint4(bf16_pair(sums[0], sums[1]), bf16_pair(sums[2], sums[3]),
                 bf16_pair(sums[4], sums[5]), bf16_pair(sums[6], sums[7]));
}

}  // namespace cake::finalize
