// SiTU, Kimi-K3's gated activation.
#pragma once

#include <cmath>

namespace cake {

// beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta). The sigmoid sees the unclamped
// gate. Evaluated in double and rounded once, so that the result does not depend on the C library.
inline float situ(float gate, float up, float beta, float linear_beta) {
  const double g = gate;
  const double u = up;
  const double b = beta;
  const double lb = linear_beta;
  const double sigmoid = 1.0 / (1.0 + std::exp(-g));
  return static_cast<float>(b * std::tanh(g / b) * sigmoid * (lb * std::tanh(u / lb)));
}

}  // namespace cake
