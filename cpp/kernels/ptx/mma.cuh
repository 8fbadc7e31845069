// Warp-level matrix multiply-accumulate.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-fragment-mma-16816-float
#pragma once

#include <cstdint>

namespace cake::ptx {

// d[16x8] += a[16x16] b[16x8], half operands, float32 sums. With g = lane / 4, t = lane % 4:
// a0, a2 hold row g, a1, a3 row g + 8 (columns 2t.. and 2t + 8..); b0, b1 hold column g; d holds
// rows g and g + 8.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                             uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace cake::ptx
