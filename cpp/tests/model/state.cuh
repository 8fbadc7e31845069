// What the model keeps of a CTA: tensor memory, the queue of asynchronous operations, and for each
// thread what it has yet to fence. Lies in global memory; one CTA at a time holds a state.
#pragma once

#include <cstdint>

#include "tests/model/descriptors.h"
#include "tests/model/errors.h"

namespace cake::model {

inline constexpr int kLanes = 128;
inline constexpr int kColumns = 512;
inline constexpr int kQueue = 512;
inline constexpr int kMaxThreads = 1024;
inline constexpr uint32_t kSharedBytes = 233472;      // 228 KB
inline constexpr uint32_t kPoison = 0x7FC0DEADu;      // never written tensor memory, a NaN
inline constexpr uint32_t kPoisonCopy = 0x7F7F7F7Fu;  // a copy's destination until it lands
inline constexpr int64_t kPatience = 6'000'000'000;   // cycles, for a barrier
inline constexpr int64_t kHalt = 40'000;              // cycles without a new operation

enum class Mode : int32_t { kEager, kLate, kRandom };

// Where a wrapper is called, as a default argument of it.
struct Location {
  const char* file;
  uint32_t line;

  __host__ __device__ static constexpr Location current(const char* file = __builtin_FILE(),
                                                        uint32_t line = __builtin_LINE()) {
    return {file, line};
  }
};

enum class Kind : uint32_t { kMma, kCp, kCommit };

struct Op {
  Kind kind;
  uint32_t d;  // or cp's destination, or commit's barrier
  uint32_t n;
  bool accumulate;
  Matrix a, b;  // cp: a
  uint32_t a_scale, b_scale;
  Location where;
};

struct ThreadState {
  bool waited;       // for a barrier, no fence after it yet
  bool loaded;       // from tensor memory, no fence before the next arrival yet
  bool load_flying;  // no wait::ld yet
  bool stored;       // to shared memory for the tensor core, no proxy fence yet
  uint32_t fences;   // proxy fences so far
  Location load;     // the last one
};

struct State {
  uint32_t words[kColumns][kLanes];  // tensor memory
  Op queue[kQueue];
  uint32_t tail;           // operations issued
  uint32_t done[4];        // operations performed by each warp of the engine
  uint32_t issuer;         // thread + 1
  uint32_t uncommitted;    // operations since the last commit
  uint32_t allocated[16];  // columns of the allocation that begins at 32 i
  bool owned[16];          // columns 32 i .. 32 i + 31
  Location allocated_at;   // the last allocation
  bool relinquished;
  uint32_t kernel_threads, exited;
  uint32_t taken;  // by a CTA
  ThreadState threads[kMaxThreads];
  uint32_t stores[kSharedBytes / 4];  // who wrote a word: (thread + 1) << 20 | its proxy fences
};

struct Control {
  State* states;
  int32_t num_states;
  Report* report;
  int32_t* reported;  // of each error, on the device; then of the planted bug
  Mode mode;
  uint32_t seed;
  int32_t bug;
  // Where a CUtensorMap has its box, bytes - 1 and rows - 1, in bits from its beginning.
  int32_t box_bytes_bit, box_rows_bit;
};

// Of this source file's kernels; the host sets those of all files that have registered.
static __constant__ Control control;

struct ControlSymbol {
  const void* symbol;
  ControlSymbol* next;
  static ControlSymbol*& first() {
    static ControlSymbol* head = nullptr;
    return head;
  }
  explicit ControlSymbol(const void* s) : symbol(s), next(first()) { first() = this; }
};

__device__ __forceinline__ State*& state_pointer() {
  __shared__ State* state;
  return state;
}
__device__ __forceinline__ State& state() { return *state_pointer(); }
__device__ __forceinline__ ThreadState& this_thread() { return state().threads[threadIdx.x]; }

template <class T>
__device__ __forceinline__ T load_volatile(const T& value) {
  return *const_cast<const volatile T*>(&value);
}

template <class T>
__device__ __forceinline__ void store_volatile(T& where, T value) {
  *const_cast<volatile T*>(&where) = value;
}

__device__ __noinline__ inline void report(Error error, Location where, uint64_t info) {
  const int index = static_cast<int>(error);
  if (atomicExch(&control.reported[index], 1) != 0) {
    return;
  }
  Occurrence& first = control.report->errors[index];
  first.block = blockIdx.x;
  first.thread = threadIdx.x;
  first.line = where.line;
  first.info = info;
  int32_t length = 0;
  while (where.file != nullptr && where.file[length] != 0) {
    ++length;
  }
  constexpr int32_t kKept = sizeof(first.file) - 1;
  const int32_t begin = length > kKept ? length - kKept : 0;
  for (int32_t i = begin; i < length; ++i) {
    first.file[i - begin] = where.file[i];
  }
  __threadfence_system();
  store_volatile(first.found, 1);
  __threadfence_system();
}

__device__ __forceinline__ void check(bool ok, Error error, Location where, uint64_t info = 0) {
  if (!ok) {
    report(error, where, info);
  }
}

// Gives up: the host sees the report and a launch failure.
__device__ __noinline__ inline void time_out(Location where, uint64_t info) {
  report(Error::kTimeout, where, info);
  __trap();
}

__device__ __forceinline__ uint32_t column_of(uint32_t address) { return address & 0xFFFFu; }
__device__ __forceinline__ uint32_t lane_of(uint32_t address) { return address >> 16; }

__device__ __forceinline__ bool columns_owned(uint32_t first, uint32_t count) {
  if (first + count > kColumns) {
    return false;
  }
  for (uint32_t c = first / 32; c <= (first + count - 1) / 32; ++c) {
    if (!state().owned[c]) {
      return false;
    }
  }
  return true;
}

__device__ __forceinline__ uint4* shared_chunk(uint32_t address) {
  return static_cast<uint4*>(__cvta_shared_to_generic(address));
}

// Operations that not every warp of the engine has performed.
__device__ __forceinline__ uint32_t first_pending() {
  uint32_t first = load_volatile(state().done[0]);
  for (int w = 1; w < 4; ++w) {
    const uint32_t done = load_volatile(state().done[w]);
    first = static_cast<int32_t>(done - first) < 0 ? done : first;
  }
  return first;
}

__device__ __forceinline__ bool overlap(uint32_t a, uint32_t a_count, uint32_t b,
                                        uint32_t b_count) {
  return a < b + b_count && b < a + a_count;
}

}  // namespace cake::model
