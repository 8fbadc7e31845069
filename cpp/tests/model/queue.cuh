// The issuing side of the model: operations are checked here, where the source line is known, and
// queued for the engine.
#pragma once

#include <cstdint>

#include "tests/model/state.cuh"

namespace cake::model {

// Every use of tensor memory after a wait needs a fence first.
__device__ __forceinline__ void check_fenced(Location where) {
  check(!this_thread().waited, Error::kFenceAfter, where);
}

__device__ __noinline__ inline void push(const Op& op) {
  State& s = state();
  const uint32_t self = threadIdx.x + 1;
  const uint32_t issuer = atomicCAS(&s.issuer, 0u, self);
  if (issuer != 0 && issuer != self) {
    report(Error::kIssuer, op.where, issuer - 1);
    return;
  }
  const uint32_t tail = s.tail;
  for (const int64_t since = clock64(); tail - first_pending() >= kQueue;) {
    if (clock64() - since > kPatience) {
      time_out(op.where, tail);
    }
  }
  s.queue[tail % kQueue] = op;
  s.uncommitted = op.kind == Kind::kCommit ? 0 : s.uncommitted + 1;
  __threadfence_block();
  store_volatile(s.tail, tail + 1);
}

__device__ __forceinline__ bool scale_columns_valid(uint32_t address, uint32_t count) {
  return lane_of(address) == 0 && address % 4 == 0 && columns_owned(column_of(address), count);
}

__device__ inline void push_mma(uint32_t d, uint64_t a_bits, uint64_t b_bits, uint32_t instruction,
                                uint32_t a_scale, uint32_t b_scale, bool accumulate,
                                Location where) {
  check_fenced(where);
  Op op{.kind = Kind::kMma,
        .d = d,
        .n = decode_instruction(instruction),
        .accumulate = accumulate,
        .a = decode_matrix(a_bits),
        .b = decode_matrix(b_bits),
        .a_scale = a_scale,
        .b_scale = b_scale,
        .where = where};
  if (op.n == 0) {
    report(Error::kInstructionDescriptor, where, instruction);
    return;
  }
  const auto valid = [](const Matrix& m, uint32_t rows) {
    return valid_operand(m) && m.address / 1024 * 1024 + rows / 8 * m.stride_bytes <= kSharedBytes;
  };
  const bool a_valid = valid(op.a, 128);
  const bool b_valid = valid(op.b, op.n);
  if (!a_valid || !b_valid) {
    report(Error::kMatrixDescriptor, where, a_valid ? b_bits : a_bits);
    return;
  }
  if (lane_of(d) != 0 || !columns_owned(column_of(d), op.n)) {
    report(Error::kTensorAddress, where, d);
    return;
  }
  if (!scale_columns_valid(a_scale, 4)) {
    report(Error::kTensorAddress, where, a_scale);
    return;
  }
  if (!scale_columns_valid(b_scale, (op.n + 127) / 128 * 4)) {
    report(Error::kTensorAddress, where, b_scale);
    return;
  }
  push(op);
}

__device__ inline void push_cp(uint32_t destination, uint64_t bits, Location where) {
  check_fenced(where);
  Op op{.kind = Kind::kCp, .d = destination, .a = decode_matrix(bits), .where = where};
  if (!valid_scales(op.a) || scale_row(op.a, 31) + 16 > kSharedBytes) {
    report(Error::kMatrixDescriptor, where, bits);
    return;
  }
  if (!scale_columns_valid(destination, 4)) {
    report(Error::kTensorAddress, where, destination);
    return;
  }
  push(op);
}

__device__ inline void push_commit(uint32_t barrier, Location where) {
  push(Op{.kind = Kind::kCommit, .d = barrier, .where = where});
}

// A copy is about to overwrite `bytes` of shared memory: nothing queued may read them. They hold
// NaNs until it lands.
__device__ __noinline__ inline void poison_copy(uint32_t destination, uint32_t bytes,
                                                Location where) {
  State& s = state();
  const uint32_t tail = load_volatile(s.tail);
  for (uint32_t i = first_pending(); static_cast<int32_t>(tail - i) > 0; ++i) {
    const Op& op = s.queue[i % kQueue];
    const auto reads = [&](const Matrix& m, uint32_t rows) {
      const uint32_t first = m.swizzle == 0 ? m.address : m.address / 1024 * 1024;
      return overlap(destination, bytes, first, rows / 8 * m.stride_bytes);
    };
    const bool race = (op.kind == Kind::kCp && reads(op.a, 32)) ||
                      (op.kind == Kind::kMma && (reads(op.a, 128) || reads(op.b, op.n)));
    check(!race, Error::kStageRace, where, destination);
  }
  const uint4 poison = make_uint4(kPoisonCopy, kPoisonCopy, kPoisonCopy, kPoisonCopy);
  for (uint32_t i = 0; i < bytes; i += 16) {
    *shared_chunk(destination + i) = poison;
  }
}

}  // namespace cake::model
