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

// Waits for all groups; the sums of N columns are read after it, never before, which the compiler
// would not know from the wait alone.
template <int N, int kSums>
__device__ __forceinline__ void wgmma_wait_all(float (&sums)[kSums]) {
  wgmma_wait_group<0>();
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    asm volatile("" : "+f"(sums[i])::"memory");
  }
}

// Shared memory matrix of 128-byte rows (K contiguous), 128-byte swizzle, 8-row groups of 1024
// bytes. Linear in the address: the matrix that begins 16 bytes later has one more.
__device__ __forceinline__ uint64_t wgmma_descriptor_swizzle128(uint32_t address) {
  constexpr uint64_t kStride = 1024 / 16;  // bits 32..45: between groups of 8 rows
  constexpr uint64_t kSwizzle128 = 1;      // bits 62..63
  constexpr uint64_t kLeading = 1;         // bits 16..29: not used with a swizzle
  return address / 16 | kLeading << 16 | kStride << 32 | kSwizzle128 << 62;
}

// The operands of one asm statement: 4 (i + 1) sums of N = 8 (i + 1) columns, numbered from 0.
#define CAKE_SUMS_0 "%0,%1,%2,%3"
#define CAKE_SUMS_1 CAKE_SUMS_0 ",%4,%5,%6,%7"
#define CAKE_SUMS_2 CAKE_SUMS_1 ",%8,%9,%10,%11"
#define CAKE_SUMS_3 CAKE_SUMS_2 ",%12,%13,%14,%15"
#define CAKE_SUMS_4 CAKE_SUMS_3 ",%16,%17,%18,%19"
#define CAKE_SUMS_5 CAKE_SUMS_4 ",%20,%21,%22,%23"
#define CAKE_SUMS_6 CAKE_SUMS_5 ",%24,%25,%26,%27"
#define CAKE_SUMS_7 CAKE_SUMS_6 ",%28,%29,%30,%31"
#define CAKE_SUMS_8 CAKE_SUMS_7 ",%32,%33,%34,%35"
#define CAKE_SUMS_9 CAKE_SUMS_8 ",%36,%37,%38,%39"
#define CAKE_SUMS_10 CAKE_SUMS_9 ",%40,%41,%42,%43"
#define CAKE_SUMS_11 CAKE_SUMS_10 ",%44,%45,%46,%47"
#define CAKE_SUMS_12 CAKE_SUMS_11 ",%48,%49,%50,%51"
#define CAKE_SUMS_13 CAKE_SUMS_12 ",%52,%53,%54,%55"
#define CAKE_SUMS_14 CAKE_SUMS_13 ",%56,%57,%58,%59"
#define CAKE_SUMS_15 CAKE_SUMS_14 ",%60,%61,%62,%63"
#define CAKE_SUMS_16 CAKE_SUMS_15 ",%64,%65,%66,%67"
#define CAKE_SUMS_17 CAKE_SUMS_16 ",%68,%69,%70,%71"
#define CAKE_SUMS_18 CAKE_SUMS_17 ",%72,%73,%74,%75"
#define CAKE_SUMS_19 CAKE_SUMS_18 ",%76,%77,%78,%79"
#define CAKE_SUMS_20 CAKE_SUMS_19 ",%80,%81,%82,%83"
#define CAKE_SUMS_21 CAKE_SUMS_20 ",%84,%85,%86,%87"
#define CAKE_ARGS(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CAKE_ARGS_0(d) CAKE_ARGS(d, 0)
#define CAKE_ARGS_1(d) CAKE_ARGS_0(d), CAKE_ARGS(d, 4)
#define CAKE_ARGS_2(d) CAKE_ARGS_1(d), CAKE_ARGS(d, 8)
#define CAKE_ARGS_3(d) CAKE_ARGS_2(d), CAKE_ARGS(d, 12)
#define CAKE_ARGS_4(d) CAKE_ARGS_3(d), CAKE_ARGS(d, 16)
#define CAKE_ARGS_5(d) CAKE_ARGS_4(d), CAKE_ARGS(d, 20)
#define CAKE_ARGS_6(d) CAKE_ARGS_5(d), CAKE_ARGS(d, 24)
#define CAKE_ARGS_7(d) CAKE_ARGS_6(d), CAKE_ARGS(d, 28)
#define CAKE_ARGS_8(d) CAKE_ARGS_7(d), CAKE_ARGS(d, 32)
#define CAKE_ARGS_9(d) CAKE_ARGS_8(d), CAKE_ARGS(d, 36)
#define CAKE_ARGS_10(d) CAKE_ARGS_9(d), CAKE_ARGS(d, 40)
#define CAKE_ARGS_11(d) CAKE_ARGS_10(d), CAKE_ARGS(d, 44)
#define CAKE_ARGS_12(d) CAKE_ARGS_11(d), CAKE_ARGS(d, 48)
#define CAKE_ARGS_13(d) CAKE_ARGS_12(d), CAKE_ARGS(d, 52)
#define CAKE_ARGS_14(d) CAKE_ARGS_13(d), CAKE_ARGS(d, 56)
#define CAKE_ARGS_15(d) CAKE_ARGS_14(d), CAKE_ARGS(d, 60)
#define CAKE_ARGS_16(d) CAKE_ARGS_15(d), CAKE_ARGS(d, 64)
#define CAKE_ARGS_17(d) CAKE_ARGS_16(d), CAKE_ARGS(d, 68)
#define CAKE_ARGS_18(d) CAKE_ARGS_17(d), CAKE_ARGS(d, 72)
#define CAKE_ARGS_19(d) CAKE_ARGS_18(d), CAKE_ARGS(d, 76)
#define CAKE_ARGS_20(d) CAKE_ARGS_19(d), CAKE_ARGS(d, 80)
#define CAKE_ARGS_21(d) CAKE_ARGS_20(d), CAKE_ARGS(d, 84)
// `a`, `b`, `c`: the numbers of the operands after the sums. A descriptor in one 64-bit register
// costs one addition a step; in two words ptxas adds moves.
#define CAKE_WGMMA(columns, i, a, b, c)                                                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " c                                         \
               ", 0;\n"                                                                      \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.f16.f16 {" CAKE_SUMS_##i \
               "}, {" a "}, " b ", p, 1, 1, 0;\n}"                                           \
               : CAKE_ARGS_##i(d)                                                            \
               : "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3]),     \
                 "l"(descriptor), "n"(kAccumulate ? 1 : 0))

inline constexpr int kWgmmaMostColumns = 176;

// d[64 x N] += a[64 x 16] b[16 x N], or = without kAccumulate; half operands, float32 sums. Of warp
// w of the warpgroup, with g = lane / 4, t = lane % 4: fragment 0, 2 hold row 16w + g, 1, 3 row 16w
// + g + 8 (columns 2t.., 2t + 8..); d[4j], d[4j + 1] row g, columns 8j + 2t and + 1; d[4j + 2],
// d[4j + 3] row g + 8. N: a multiple of 8 up to 88, of 16 above.
template <int N, bool kAccumulate = true, int kSums>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[kSums], const uint32_t (&fragment)[4],
                                             uint64_t descriptor) {
  static_assert(N % (N <= 88 ? 8 : 16) == 0 && N >= 8 && N <= kWgmmaMostColumns && N <= 2 * kSums);
  if constexpr (N == 8) {
    CAKE_WGMMA("8", 0, "%4,%5,%6,%7", "%8", "%9");
  } else if constexpr (N == 16) {
    CAKE_WGMMA("16", 1, "%8,%9,%10,%11", "%12", "%13");
  } else if constexpr (N == 24) {
    CAKE_WGMMA("24", 2, "%12,%13,%14,%15", "%16", "%17");
  } else if constexpr (N == 32) {
    CAKE_WGMMA("32", 3, "%16,%17,%18,%19", "%20", "%21");
  } else if constexpr (N == 40) {
    CAKE_WGMMA("40", 4, "%20,%21,%22,%23", "%24", "%25");
  } else if constexpr (N == 48) {
    CAKE_WGMMA("48", 5, "%24,%25,%26,%27", "%28", "%29");
  } else if constexpr (N == 56) {
    CAKE_WGMMA("56", 6, "%28,%29,%30,%31", "%32", "%33");
  } else if constexpr (N == 64) {
    CAKE_WGMMA("64", 7, "%32,%33,%34,%35", "%36", "%37");
  } else if constexpr (N == 72) {
    CAKE_WGMMA("72", 8, "%36,%37,%38,%39", "%40", "%41");
  } else if constexpr (N == 80) {
    CAKE_WGMMA("80", 9, "%40,%41,%42,%43", "%44", "%45");
  } else if constexpr (N == 88) {
    CAKE_WGMMA("88", 10, "%44,%45,%46,%47", "%48", "%49");
  } else if constexpr (N == 96) {
    CAKE_WGMMA("96", 11, "%48,%49,%50,%51", "%52", "%53");
  } else if constexpr (N == 112) {
    CAKE_WGMMA("112", 13, "%56,%57,%58,%59", "%60", "%61");
  } else if constexpr (N == 128) {
    CAKE_WGMMA("128", 15, "%64,%65,%66,%67", "%68", "%69");
  } else if constexpr (N == 144) {
    CAKE_WGMMA("144", 17, "%72,%73,%74,%75", "%76", "%77");
  } else if constexpr (N == 160) {
    CAKE_WGMMA("160", 19, "%80,%81,%82,%83", "%84", "%85");
  } else if constexpr (N == 176) {
    CAKE_WGMMA("176", 21, "%88,%89,%90,%91", "%92", "%93");
  }
}

#undef CAKE_WGMMA
}  // namespace cake::ptx
