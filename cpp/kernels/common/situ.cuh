// SiTU on a GPU: relative error below 2^-20 for gates above -8, below 2^-18 above -49;
// beyond that the sigmoid stays at 2^-72 instead of vanishing. For betas of 1e-10 to 1e10. The
// formula is in common/situ.h.
#pragma once

#include "ptx/arithmetic.cuh"

namespace cake {

struct SituConstants {
  float beta, linear_beta;  // of one expert
  float reciprocal_beta, reciprocal_linear_beta;

  __device__ __forceinline__ SituConstants(float b, float lb)
      : beta(b),
        linear_beta(lb),
        reciprocal_beta(ptx::rcp_approx(b)),
        reciprocal_linear_beta(ptx::rcp_approx(lb)) {}
};

// tanh(x) as numerator / denominator, so that three quotients cost one reciprocal.
struct Quotient {
  float numerator, denominator;
};

// (1 - e) / (1 + e) with e = exp(-2x), bounded to 2^26 (where tanh is 1 to the last bit); near
// zero, where 1 - e cancels, the first terms of the series, within 2e-7.
__device__ __forceinline__ Quotient tanh_quotient(float x) {
  constexpr float kMinus2Log2E = -2.8853900817779268f;
  const float e = ptx::ex2_approx(fminf(fmaxf(x * kMinus2Log2E, -26.0f), 26.0f));
  const float square = x * x;
  const float series = x * (1.0f + square * (-1.0f / 3.0f + square * (2.0f / 15.0f)));
  const bool small = fabsf(x) < 0.125f;
  return {small ? series : 1.0f - e, small ? 1.0f : 1.0f + e};
}

__device__ __forceinline__ float situ(float gate, float up, const SituConstants& c) {
  constexpr float kMinusLog2E = -1.4426950408889634f;
  const Quotient g = tanh_quotient(gate * c.reciprocal_beta);
  const Quotient u = tanh_quotient(up * c.reciprocal_linear_beta);
  // 2^72 at most: the product of the denominators stays finite, the sigmoid is below 3e-22 there.
  const float s = ptx::ex2_approx(fminf(gate * kMinusLog2E, 72.0f));
  const float denominator = g.denominator * u.denominator * (1.0f + s);
  const float value =
      (c.beta * g.numerator) * (c.linear_beta * u.numerator) * ptx::rcp_approx(denominator);
  return gate != gate || up != up ? gate + up : value;  // the bounds drop a NaN
}

}  // namespace cake
