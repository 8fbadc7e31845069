// The model's tensor memory and matrix instruction: see cpp/kernels/ptx/tcgen05.cuh.
#pragma once

#include <cstdint>

#include "tests/model/loads.cuh"
#include "tests/model/native.cuh"
#include "tests/model/queue.cuh"

namespace cake::ptx {

template <uint32_t kColumns>
__device__ __forceinline__ void tcgen05_alloc(uint32_t destination,
                                              model::Location where = model::Location::current()) {
  static_assert(kColumns >= 32 && kColumns <= 512 && (kColumns & (kColumns - 1)) == 0);
  model::allocate(destination, kColumns, where);
}

__device__ __forceinline__ void tcgen05_relinquish_alloc_permit(
    model::Location where = model::Location::current()) {
  model::check_whole_warp(0, where);
  model::state().relinquished = true;
}

template <uint32_t kColumns>
__device__ __forceinline__ void tcgen05_dealloc(
    uint32_t address, model::Location where = model::Location::current()) {
  model::free_columns(address, kColumns, where);
}

__device__ __forceinline__ void tcgen05_fence_before_thread_sync(
    model::Location where = model::Location::current()) {
  model::ThreadState& self = model::this_thread();
  model::check(!self.load_flying, model::Error::kLoadWait, where);
  self.loaded = false;
  __threadfence_block();
}

__device__ __forceinline__ void tcgen05_fence_after_thread_sync() {
  model::this_thread().waited = false;
  __threadfence_block();
}

__device__ __forceinline__ void tcgen05_cp_32x128b_warpx4(
    uint32_t destination, uint64_t descriptor, model::Location where = model::Location::current()) {
  model::push_cp(destination, descriptor, where);
}

__device__ __forceinline__ void tcgen05_mma_mxf4nvf4_block16(
    uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scale, uint32_t b_scale,
    bool accumulate, model::Location where = model::Location::current()) {
  model::push_mma(d, a, b, instruction, a_scale, b_scale, accumulate, where);
}

__device__ __forceinline__ void tcgen05_commit(uint32_t barrier,
                                               model::Location where = model::Location::current()) {
  model::push_commit(barrier, where);
}

template <int kWords>
__device__ __forceinline__ void tcgen05_ld_16x256b(
    uint32_t (&w)[kWords], uint32_t address, model::Location where = model::Location::current()) {
  static_assert(kWords == 4 || kWords == 8 || kWords == 16 || kWords == 32);
  model::begin_load(w, address, where);
}

template <int... kWords>
__device__ __forceinline__ void tcgen05_wait_ld(uint32_t (&... loads)[kWords]) {
  if (model::control.mode != model::Mode::kEager) {
    model::hold_loads();
  }
  (model::end_load(loads), ...);
  model::this_thread().load_flying = false;
}

}  // namespace cake::ptx
