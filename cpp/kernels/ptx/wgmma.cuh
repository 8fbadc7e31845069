// Warpgroup matrix multiply-accumulate, A in registers.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
#pragma once

#include <cstdint>

namespace cake::ptx {

// Orders register and shared memory accesses before the wgmmas that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of this warpgroup's groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Shared memory matrix of 128-byte rows (K contiguous), 128-byte swizzle, 8-row groups of 1024
// bytes.
__device__ __forceinline__ uint64_t wgmma_descriptor_swizzle128(uint32_t address) {
  constexpr uint64_t kStride = 1024 / 16;  // bits 32..45: between groups of 8 rows
  constexpr uint64_t kSwizzle128 = 1;      // bits 62..63
  constexpr uint64_t kLeading = 1;         // bits 16..29: not used with a swizzle
  return (address & 0x3FFFFu) >> 4 | kLeading << 16 | kStride << 32 | kSwizzle128 << 62;
}

// Operands are numbered: 0..3 A, 4 the descriptor of B, 5.. the sums (all read and written, so that
// the numbers do not depend on N). Eight sums for every 16 columns.
#define CAKE_SUMS_0 "%5,%6,%7,%8,%9,%10,%11,%12"
#define CAKE_SUMS_1 CAKE_SUMS_0 ",%13,%14,%15,%16,%17,%18,%19,%20"
#define CAKE_SUMS_2 CAKE_SUMS_1 ",%21,%22,%23,%24,%25,%26,%27,%28"
#define CAKE_SUMS_3 CAKE_SUMS_2 ",%29,%30,%31,%32,%33,%34,%35,%36"
#define CAKE_SUMS_4 CAKE_SUMS_3 ",%37,%38,%39,%40,%41,%42,%43,%44"
#define CAKE_SUMS_5 CAKE_SUMS_4 ",%45,%46,%47,%48,%49,%50,%51,%52"
#define CAKE_SUMS_6 CAKE_SUMS_5 ",%53,%54,%55,%56,%57,%58,%59,%60"
#define CAKE_SUMS_7 CAKE_SUMS_6 ",%61,%62,%63,%64,%65,%66,%67,%68"
#define CAKE_SUMS_8 CAKE_SUMS_7 ",%69,%70,%71,%72,%73,%74,%75,%76"
#define CAKE_SUMS_9 CAKE_SUMS_8 ",%77,%78,%79,%80,%81,%82,%83,%84"
#define CAKE_SUMS_10 CAKE_SUMS_9 ",%85,%86,%87,%88,%89,%90,%91,%92"
#define CAKE_SUMS_11 CAKE_SUMS_10 ",%93,%94,%95,%96,%97,%98,%99,%100"
#define CAKE_ARGS(d, i)                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define CAKE_ARGS_0(d) CAKE_ARGS(d, 0)
#define CAKE_ARGS_1(d) CAKE_ARGS_0(d), CAKE_ARGS(d, 8)
#define CAKE_ARGS_2(d) CAKE_ARGS_1(d), CAKE_ARGS(d, 16)
#define CAKE_ARGS_3(d) CAKE_ARGS_2(d), CAKE_ARGS(d, 24)
#define CAKE_ARGS_4(d) CAKE_ARGS_3(d), CAKE_ARGS(d, 32)
#define CAKE_ARGS_5(d) CAKE_ARGS_4(d), CAKE_ARGS(d, 40)
#define CAKE_ARGS_6(d) CAKE_ARGS_5(d), CAKE_ARGS(d, 48)
#define CAKE_ARGS_7(d) CAKE_ARGS_6(d), CAKE_ARGS(d, 56)
#define CAKE_ARGS_8(d) CAKE_ARGS_7(d), CAKE_ARGS(d, 64)
#define CAKE_ARGS_9(d) CAKE_ARGS_8(d), CAKE_ARGS(d, 72)
#define CAKE_ARGS_10(d) CAKE_ARGS_9(d), CAKE_ARGS(d, 80)
#define CAKE_ARGS_11(d) CAKE_ARGS_10(d), CAKE_ARGS(d, 88)
#define CAKE_WGMMA(columns, blocks)                                                      \
  asm volatile(                                                                          \
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                         \
      "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.f16.f16 {" CAKE_SUMS_##blocks \
      "}, {%0,%1,%2,%3}, %4, p, 1, 1, 0;\n}"                                             \
      : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]), "+l"(b), CAKE_ARGS_##blocks(d))

// d[64 x N] += a[64 x 16] b[16 x N], half operands, float32 sums. Of warp w of the warpgroup, with
// g = lane / 4, t = lane % 4: a0, a2 hold row 16w + g, a1, a3 row 16w + g + 8 (columns 2t.., 2t
// + 8..); d[4j], d[4j + 1] row g, columns 8j + 2t and + 1; d[4j + 2], d[4j + 3] row g + 8.
template <int N>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[96], uint32_t (&a)[4], uint64_t b) {
  static_assert(N % 16 == 0 && N >= 16 && N <= 192, "N must be a multiple of 16 up to 192");
  if constexpr (N == 16) {
    CAKE_WGMMA("16", 0);
  } else if constexpr (N == 32) {
    CAKE_WGMMA("32", 1);
  } else if constexpr (N == 48) {
    CAKE_WGMMA("48", 2);
  } else if constexpr (N == 64) {
    CAKE_WGMMA("64", 3);
  } else if constexpr (N == 80) {
    CAKE_WGMMA("80", 4);
  } else if constexpr (N == 96) {
    CAKE_WGMMA("96", 5);
  } else if constexpr (N == 112) {
    CAKE_WGMMA("112", 6);
  } else if constexpr (N == 128) {
    CAKE_WGMMA("128", 7);
  } else if constexpr (N == 144) {
    CAKE_WGMMA("144", 8);
  } else if constexpr (N == 160) {
    CAKE_WGMMA("160", 9);
  } else if constexpr (N == 176) {
    CAKE_WGMMA("176", 10);
  } else if constexpr (N == 192) {
    CAKE_WGMMA("192", 11);
  }
}

#undef CAKE_WGMMA
}  // namespace cake::ptx
