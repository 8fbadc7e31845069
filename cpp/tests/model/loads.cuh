// The model's allocator of columns, and loads of tensor memory in two halves: an instruction that
// leaves NaNs in the registers, and the wait that delivers.
#pragma once

#include <cstdint>

#include "tests/model/queue.cuh"

namespace cake::model {

// The whole warp executes, with one address.
__device__ __forceinline__ void check_whole_warp(uint32_t address, Location where) {
  int same = 0;
  __match_all_sync(0xFFFFFFFFu, address, &same);  // waits for the whole warp
  check(same != 0, Error::kWarp, where, address);
}

__device__ inline void allocate(uint32_t destination, uint32_t columns, Location where) {
  check_whole_warp(destination, where);
  State& s = state();
  if (threadIdx.x % 32 == 0) {
    check(!s.relinquished, Error::kAllocation, where, columns);
    uint32_t first = 0;  // in units of 32, aligned to the allocation's size
    const auto free = [&](uint32_t at) {
      bool all = true;
      for (uint32_t i = at; i < at + columns / 32; ++i) {
        all = all && !s.owned[i];
      }
      return all;
    };
    while (first < 16 && !free(first)) {
      first += columns / 32;
    }
    if (first >= 16) {  // on the GPU this CTA would wait for itself
      time_out(where, columns);
    }
    s.allocated[first] = columns;
    s.allocated_at = where;
    for (uint32_t i = first; i < first + columns / 32; ++i) {
      s.owned[i] = true;
    }
    *static_cast<uint32_t*>(__cvta_shared_to_generic(destination)) = first * 32;
  }
  __syncwarp();
}

__device__ inline void free_columns(uint32_t address, uint32_t columns, Location where) {
  check_whole_warp(address, where);
  check_fenced(where);
  State& s = state();
  const uint32_t first = column_of(address) / 32;
  const bool valid = address % 32 == 0 && address < kColumns && s.allocated[first] == columns;
  check(valid, Error::kAllocation, where, address);
  const uint32_t tail = load_volatile(s.tail);
  for (uint32_t i = first_pending(); static_cast<int32_t>(tail - i) > 0; ++i) {
    check(s.queue[i % kQueue].kind == Kind::kCommit, Error::kAllocation, where, address);
  }
  for (uint32_t i = threadIdx.x % 32; i < s.kernel_threads; i += 32) {
    check(!load_volatile(s.threads[i].loaded), Error::kFenceBefore, where, i);
  }
  __syncwarp();
  if (!valid) {
    return;
  }
  for (uint32_t i = threadIdx.x % 32; i < columns * kLanes; i += 32) {
    s.words[first * 32 + i / kLanes][i % kLanes] = kPoison;
  }
  if (threadIdx.x % 32 < columns / 32) {
    s.owned[first + threadIdx.x % 32] = false;
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    s.allocated[first] = 0;
  }
}

// Word i of a 16x256b load by this thread.
__device__ __forceinline__ uint32_t tensor_word(uint32_t address, uint32_t i) {
  const uint32_t lane = threadIdx.x % 32;
  return load_volatile(state().words[column_of(address) + i / 4 * 8 + lane % 4 * 2 + i % 2]
                                    [lane_of(address) + lane / 4 + i / 2 % 2 * 8]);
}

// NaNs that say which load they wait for: lane and column, 16 bits; then a digest of the words.
inline constexpr uint32_t kFlying = 0x7FC00000u;

template <int kWords>
__device__ __forceinline__ uint32_t digest(uint32_t address, bool& poisoned) {
  uint32_t sum = 0;
  for (uint32_t i = 0; i < kWords; ++i) {
    const uint32_t word = tensor_word(address, i);
    poisoned |= word == kPoison;
    sum = (sum ^ word) * 0x9E3779B1u;
  }
  return sum >> 10;
}

template <int kWords>
__device__ __forceinline__ void begin_load(uint32_t (&w)[kWords], uint32_t address,
                                           Location where) {
  check_whole_warp(address, where);
  check_fenced(where);
  ThreadState& self = this_thread();
  self.loaded = self.load_flying = true;
  self.load = where;
  const uint32_t columns = kWords / 4 * 8;
  const uint32_t quarter = threadIdx.x / 32 % 4;
  const uint32_t column = column_of(address);
  w[0] = w[1] = 0;
  check(lane_of(address) / 32 == quarter && lane_of(address) % 16 == 0, Error::kWarp, where,
        address);
  if (lane_of(address) % 16 != 0 || lane_of(address) >= kLanes || !columns_owned(column, columns)) {
    report(Error::kTensorAddress, where, address);
    return;
  }
  const uint32_t tail = load_volatile(state().tail);
  for (uint32_t i = first_pending() + threadIdx.x % 32; static_cast<int32_t>(tail - i) > 0;
       i += 32) {
    const Op& op = state().queue[i % kQueue];
    check(op.kind != Kind::kMma || !overlap(column, columns, column_of(op.d), op.n),
          Error::kLoadRace, where, address);
  }
  __syncwarp();
  bool poisoned = false;
  w[1] = kFlying | digest<kWords>(address, poisoned);
  check(!poisoned, Error::kUninitialized, where, address);
  w[0] = kFlying | lane_of(address) << 9 | column;
#pragma unroll
  for (int i = 2; i < kWords; ++i) {
    w[i] = kPoison;
  }
}

// Keeps a warp's loads in flight, but for the mode eager, until the issuer has come to a halt and
// all is performed: by then a matrix instruction that does not wait for them has overwritten what
// they read. A correct kernel's halts for want of the accumulator that they are about to free.
__device__ __noinline__ inline void hold_loads() {
  constexpr int64_t kIdle = 3 * kHalt;           // cycles; a stage's copies take less
  constexpr int64_t kLongestHold = 200'000'000;  // cycles
  uint32_t seen = load_volatile(state().tail);
  if (control.mode == Mode::kRandom) {
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t chance =
        (control.seed * 2654435761u + blockIdx.x * 97u + warp + seen) * 0x9E3779B1u;
    if (chance >> 30 != 0) {
      return;
    }
  }
  const int64_t began = clock64();
  for (int64_t since = began, now = began; now - since <= kIdle && now - began < kLongestHold;) {
    __nanosleep(500);
    now = clock64();
    const uint32_t tail = load_volatile(state().tail);
    if (tail != seen || first_pending() != tail) {
      seen = tail;
      since = now;
    }
  }
}

template <int kWords>
__device__ __forceinline__ void end_load(uint32_t (&w)[kWords]) {
  const uint32_t tag = w[0];
  const Location where = this_thread().load;
  if ((tag & ~0xFFFFu) != kFlying || !this_thread().load_flying) {
    report(Error::kLoadWait, where, tag);
    return;
  }
  const uint32_t address = (tag >> 9 & 127u) << 16 | (tag & 511u);
  bool poisoned = false;
  check(w[1] == (kFlying | digest<kWords>(address, poisoned)), Error::kLoadRace, where, address);
#pragma unroll
  for (uint32_t i = 0; i < kWords; ++i) {
    w[i] = tensor_word(address, i);
  }
}

}  // namespace cake::model
