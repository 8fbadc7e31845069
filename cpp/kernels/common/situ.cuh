// SiTU on a GPU. Functions of 1 ulp to 2^-22 relative error; see common/situ.h for the formula.
#pragma once

#include "ptx/arithmetic.cuh"

namespace cake {

// tanh(x) = 1 - 2 / (1 + exp(2x)); saturates to +-1, NaN stays NaN.
__device__ __forceinline__ float tanh_by_exp(float x) {
  return 1.0f - 2.0f * ptx::rcp_approx(1.0f + __expf(2.0f * x));
}

struct SituConstants {
  float beta, linear_beta;                        // of one expert
  float reciprocal_beta, reciprocal_linear_beta;  // 1/beta, 1/linear_beta
};

__device__ __forceinline__ float situ(float gate, float up, const SituConstants& c) {
  const float sigmoid = ptx::rcp_approx(1.0f + __expf(-gate));
  return c.linear_beta * tanh_by_exp(up * c.reciprocal_linear_beta) *
         (c.beta * tanh_by_exp(gate * c.reciprocal_beta) * sigmoid);
}

}  // namespace cake
