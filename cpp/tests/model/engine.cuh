// The performing side of the model: four warps, each with its quarter of the lanes of tensor
// memory, take operations from the queue. Only what PTX promises is kept in order: mma after mma,
// mma after cp, commits after both. When operations are performed is the mode's choice:
//
//   eager    at once, so that a matrix instruction that is issued too early reads what is there
//   late     when the issuer has come to a halt or the queue is half full, so that whatever is
//            reused without its commit has been overwritten
//   random   a part of what is queued, after random pauses
//
// In the last two, cp overtakes earlier matrix instructions, which PTX does not rule out, and loads
// of tensor memory stay in flight until the issuer has come to a halt, at random in some cases
// only.
#pragma once

#include <cstdint>

#include "ptx/special_register.cuh"
#include "tests/model/arithmetic.h"
#include "tests/model/native.cuh"
#include "tests/model/state.cuh"

namespace cake::model {

inline constexpr int32_t kEngineThreads = 128;
inline constexpr int32_t kStartBarrier = 0;  // of all threads
inline constexpr int32_t kEngineBarrier = 15;
inline constexpr int64_t kLongestKernel = 20'000'000'000;  // cycles

__device__ __forceinline__ uint32_t& scale_word(uint32_t address, uint32_t row, uint32_t quarter) {
  return state().words[column_of(address) + row / 32][quarter * 32 + row % 32];
}

// A store by a thread must have been followed by that thread's proxy fence.
__device__ __forceinline__ void check_store_fenced(uint32_t address, Location where) {
  const State& s = state();
  const uint32_t store = load_volatile(s.stores[address / 4]);
  if (store != 0) {
    const uint32_t fences = load_volatile(s.threads[(store >> 20) - 1].fences);
    check((store & 0xFFFFFu) != (fences & 0xFFFFFu), Error::kProxyFence, where, address);
  }
}

__device__ __forceinline__ void load_row(const Matrix& m, uint32_t row, Location where,
                                         Row& decoded) {
  uint32_t codes[8];
#pragma unroll
  for (uint32_t c = 0; c < 2; ++c) {
    const uint32_t address = operand_chunk(m, row, c);
    const uint4 chunk = *shared_chunk(address);
    codes[4 * c] = chunk.x, codes[4 * c + 1] = chunk.y;
    codes[4 * c + 2] = chunk.z, codes[4 * c + 3] = chunk.w;
    check_store_fenced(address, where);
  }
  decode_row(codes, decoded);
}

// Row `32 warp + lane` of the accumulator.
__device__ __noinline__ inline void perform_mma(const Op& op, uint32_t warp, uint32_t lane) {
  constexpr uint32_t kAll = 0xFFFFFFFFu;
  const uint32_t row = warp * 32 + lane;
  Row a;
  load_row(op.a, row, op.where, a);
  const uint32_t a_scale = scale_word(op.a_scale, row, warp);
  check(a_scale != kPoison, Error::kUninitialized, op.where, op.a_scale);
  for (uint32_t first = 0; first < op.n; first += 32) {
    const uint32_t count = min(32u, op.n - first);
    Row mine{};
    uint32_t my_scale = 0;
    if (lane < count) {
      load_row(op.b, first + lane, op.where, mine);
      my_scale = scale_word(op.b_scale, first + lane, warp);
      check(my_scale != kPoison, Error::kUninitialized, op.where, op.b_scale);
    }
    __syncwarp();
#pragma unroll 2
    for (uint32_t n = 0; n < count; ++n) {
      uint32_t& d = state().words[column_of(op.d) + first + n][row];
      const uint32_t b_scale = __shfl_sync(kAll, my_scale, n);
      const auto b = [&](int word) { return __shfl_sync(kAll, mine.words[word], n); };
      check(!op.accumulate || d != kPoison, Error::kUninitialized, op.where, op.d + first + n);
      float sum = op.accumulate ? __uint_as_float(d) : 0.0f;
#pragma unroll
      for (int group = 0; group < 4; ++group) {
        sum = add_group(sum, a, b, a_scale, b_scale, group);
      }
      d = __float_as_uint(sum);
    }
  }
}

__device__ __noinline__ inline void perform_cp(const Op& op, uint32_t warp, uint32_t lane) {
  const uint32_t address = scale_row(op.a, lane);
  const uint4 chunk = *shared_chunk(address);
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (uint32_t c = 0; c < 4; ++c) {
    check_store_fenced(address + 4 * c, op.where);
    state().words[column_of(op.d) + c][warp * 32 + lane] = words[c];
  }
}

// What one warp of the engine knows; the same in all lanes.
class EngineWarp {
 public:
  __device__ EngineWarp(uint32_t warp, uint32_t lane)
      : warp_(warp),
        lane_(lane),
        random_(control.seed * 2654435761u + blockIdx.x * 97u + warp + 1) {}

  __device__ void run() {
    const int64_t began = clock64();
    int64_t since = began;
    for (;;) {
      const uint32_t exited = load_volatile(state().exited);  // before the tail
      __threadfence_block();
      const uint32_t tail = __shfl_sync(0xFFFFFFFFu, load_volatile(state().tail), 0);
      __threadfence_block();
      const int64_t now = clock64();
      if (tail != seen_) {
        seen_ = tail;
        since = now;
      }
      const bool over = __shfl_sync(0xFFFFFFFFu, exited == state().kernel_threads, 0) != 0;
      const bool halted =
          __shfl_sync(0xFFFFFFFFu, now - since > kHalt || tail - head_ > kQueue / 2, 0) != 0;
      if (now - began > kLongestKernel) {
        time_out(Location{}, 0);
      }
      uint32_t limit = tail;
      if (control.mode != Mode::kEager) {
        hoist(tail);
        limit = halted || over ? tail : head_;
        if (control.mode == Mode::kRandom && !halted) {
          limit = head_ + next_random() % (tail - head_ + 1);
          __nanosleep(next_random() % 1024);
        }
      }
      while (head_ != limit) {
        perform_next();
      }
      if (over && head_ == tail) {
        return;
      }
    }
  }

 private:
  // Performs every cp that is queued.
  __device__ void hoist(uint32_t tail) {
    for (; hoisted_ != tail; ++hoisted_) {
      const Op& op = state().queue[hoisted_ % kQueue];
      if (op.kind != Kind::kCp) {
        continue;
      }
      for (uint32_t i = head_ + lane_; static_cast<int32_t>(hoisted_ - i) > 0; i += 32) {
        const Op& earlier = state().queue[i % kQueue];
        const uint32_t column = column_of(op.d);
        check(earlier.kind != Kind::kMma ||
                  (!overlap(column, 4, column_of(earlier.a_scale), 4) &&
                   !overlap(column, 4, column_of(earlier.b_scale), (earlier.n + 127) / 128 * 4)),
              Error::kScaleRace, op.where, op.d);
      }
      perform_cp(op, warp_, lane_);
      __syncwarp();
    }
  }

  __device__ void perform_next() {
    const Op& op = state().queue[head_ % kQueue];
    if (op.kind == Kind::kMma) {
      perform_mma(op, warp_, lane_);
    } else if (op.kind == Kind::kCp) {
      if (static_cast<int32_t>(hoisted_ - head_) <= 0) {
        perform_cp(op, warp_, lane_);
      }
    } else {
      __threadfence_block();
      __syncwarp();
      native::bar_sync(kEngineBarrier, kEngineThreads);
      if (warp_ == 0 && lane_ == 0) {
        native::mbarrier_arrive(op.d);
      }
    }
    __threadfence_block();
    __syncwarp();
    ++head_;
    hoisted_ = static_cast<int32_t>(hoisted_ - head_) < 0 ? head_ : hoisted_;
    if (lane_ == 0) {
      store_volatile(state().done[warp_], head_);
    }
  }

  __device__ uint32_t next_random() {
    random_ ^= random_ << 13, random_ ^= random_ >> 17, random_ ^= random_ << 5;
    return random_;
  }

  uint32_t warp_, lane_;
  uint32_t random_;
  uint32_t head_ = 0;     // next to perform
  uint32_t hoisted_ = 0;  // cp before this are performed
  uint32_t seen_ = 0;
};

// Takes a free state; other CTAs of the SM, or of the next grid, wait for one as they would wait
// for columns.
__device__ inline void take_state(int32_t thread) {
  extern __shared__ uint32_t dynamic_shared[];
  if (thread == 0) {
    for (uint32_t i = blockIdx.x;; ++i) {
      State& s = control.states[i % control.num_states];
      if (atomicCAS(&s.taken, 0u, 1u) == 0) {
        state_pointer() = &s;
        break;
      }
    }
  }
  native::bar_sync(kEngineBarrier, kEngineThreads);
  const uint32_t shared_bytes = ptx::dynamic_smem_size();
  for (uint32_t i = thread; i < shared_bytes / 4; i += kEngineThreads) {
    dynamic_shared[i] = kPoisonCopy;
  }
  State& s = state();
  for (int32_t i = thread; i < kColumns * kLanes; i += kEngineThreads) {
    s.words[i / kLanes][i % kLanes] = kPoison;
  }
  for (int32_t i = thread; i < static_cast<int32_t>(kSharedBytes / 4); i += kEngineThreads) {
    s.stores[i] = 0;
  }
  for (int32_t i = thread; i < kMaxThreads; i += kEngineThreads) {
    s.threads[i] = {};
  }
  if (thread < 16) {
    s.allocated[thread] = 0;
    s.owned[thread] = false;
  }
  if (thread == 0) {
    s.tail = s.done[0] = s.done[1] = s.done[2] = s.done[3] = 0;
    s.issuer = s.uncommitted = s.exited = 0;
    s.relinquished = false;
    s.kernel_threads = blockDim.x - kEngineThreads;
    control.report->engine_ran = 1;
  }
  __threadfence_block();
}

__device__ inline void give_state_back(int32_t thread) {
  State& s = state();
  for (int32_t i = thread; i < static_cast<int32_t>(s.kernel_threads); i += kEngineThreads) {
    check(!s.threads[i].load_flying, Error::kLoadWait, Location{}, i);
  }
  if (thread < 16) {
    check(!s.owned[thread], Error::kNotFreed, s.allocated_at, thread * 32);
  }
  if (thread == 0) {
    check(s.uncommitted == 0, Error::kCommitMissing, s.queue[(s.tail - 1) % kQueue].where, s.tail);
  }
  __threadfence();
  native::bar_sync(kEngineBarrier, kEngineThreads);
  if (thread == 0) {
    atomicExch(&s.taken, 0u);
  }
}

}  // namespace cake::model
