// Tensor memory and the block-scaled matrix instruction of sm_100a and sm_103a, one CTA.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen05-family-instructions
//
// Addresses of tensor memory are lane << 16 | column; common/tcgen05_layout.h has the descriptors.
// cp and mma are asynchronous; one thread issues all of them, and its commits follow them. Waits
// for a barrier and uses of tensor memory are ordered by the two fences below, nothing else.
#pragma once

#include <cstdint>

namespace cake::ptx {

// A whole warp takes kColumns (32, 64, .. 512) columns and stores their address in shared memory;
// waits until they are free.
template <uint32_t kColumns>
__device__ __forceinline__ void tcgen05_alloc(uint32_t destination) {
  asm volatile(
      "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(destination),
      "n"(kColumns)
      : "memory");
}

// A whole warp: this CTA will allocate no more.
__device__ __forceinline__ void tcgen05_relinquish_alloc_permit() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
}

// The warp that took the columns gives them back, before the CTA ends.
template <uint32_t kColumns>
__device__ __forceinline__ void tcgen05_dealloc(uint32_t address) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "n"(kColumns)
               : "memory");
}

// After loads of tensor memory, before a barrier says so to others.
__device__ __forceinline__ void tcgen05_fence_before_thread_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

// After waiting for a barrier, before the tensor memory that it guards is used.
__device__ __forceinline__ void tcgen05_fence_after_thread_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// One thread: 32 rows of 16 bytes (a block of 128 x 4 scales) to 32 lanes x 4 columns, in all four
// quarters of the lanes.
__device__ __forceinline__ void tcgen05_cp_32x128b_warpx4(uint32_t destination,
                                                          uint64_t descriptor) {
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(destination),
               "l"(descriptor)
               : "memory");
}

// One thread: d[128 x N] = a[128 x 64] b[N x 64]^T, plus d if `accumulate`; E2M1 operands in shared
// memory, an E4M3 scale for each 16 columns in tensor memory, float32 sums.
__device__ __forceinline__ void tcgen05_mma_mxf4nvf4_block16(uint32_t d, uint64_t a, uint64_t b,
                                                             uint32_t instruction, uint32_t a_scale,
                                                             uint32_t b_scale, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.u32 accumulate, %6, 0;\n"
      "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 "
      "[%0], %1, %2, %3, [%4], [%5], accumulate;\n"
      "}" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(a_scale), "r"(b_scale), "r"(uint32_t{accumulate})
      : "memory");
}

// One arrival on `barrier` when all cp and mma that this thread has issued are complete.
__device__ __forceinline__ void tcgen05_commit(uint32_t barrier) {
  asm volatile(
      "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
      : "memory");
}

#define CAKE_WORDS(w, i) "=r"(w[i]), "=r"(w[i + 1]), "=r"(w[i + 2]), "=r"(w[i + 3])
#define CAKE_WORDS8(w, i) CAKE_WORDS(w, i), CAKE_WORDS(w, i + 4)
#define CAKE_WORDS16(w, i) CAKE_WORDS8(w, i), CAKE_WORDS8(w, i + 8)

// A whole warp, after the wait below: words 4i .. 4i + 3 of lane t are columns 8i + 2(t % 4) and
// the next of row t / 4, then of row t / 4 + 8. 16 rows from the address on, within the 32 of the
// warp's quarter; kWords = 4, 8, 16 or 32, two columns a word.
template <int kWords>
__device__ __forceinline__ void tcgen05_ld_16x256b(uint32_t (&w)[kWords], uint32_t address) {
  static_assert(kWords == 4 || kWords == 8 || kWords == 16 || kWords == 32);
  if constexpr (kWords == 4) {
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x1.b32 {%0,%1,%2,%3}, [%4];"
                 : CAKE_WORDS(w, 0)
                 : "r"(address));
  } else if constexpr (kWords == 8) {
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x2.b32 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8];"
                 : CAKE_WORDS8(w, 0)
                 : "r"(address));
  } else if constexpr (kWords == 16) {
    asm volatile(
        "tcgen05.ld.sync.aligned.16x256b.x4.b32 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, [%16];"
        : CAKE_WORDS16(w, 0)
        : "r"(address));
  } else {
    asm volatile(
        "tcgen05.ld.sync.aligned.16x256b.x8.b32 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, [%32];"
        : CAKE_WORDS16(w, 0), CAKE_WORDS16(w, 16)
        : "r"(address));
  }
}

#undef CAKE_WORDS16
#undef CAKE_WORDS8
#undef CAKE_WORDS

// A whole warp waits for all its loads; their words are used after it, never before, which the
// compiler would not know from the wait alone. Name the words of every load in flight.
template <int... kWords>
__device__ __forceinline__ void tcgen05_wait_ld(uint32_t (&... loads)[kWords]) {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
  const auto use = [](auto& words) {
#pragma unroll
    for (auto& word : words) {
      asm volatile("" : "+r"(word)::"memory");
    }
  };
  (use(loads), ...);
}

}  // namespace cake::ptx
