// The tiny operation of the golden data (E=4, H=128, I=64, T=5, k=3, per-expert scales), and random
// layers of any geometry.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "cake/fused_moe.h"
#include "common/nvfp4.h"
#include "npy.h"

namespace cake::testing {

// Operands of one call, owned.
struct Operands {
  Shape shape;
  int32_t num_tokens;
  std::vector<uint16_t> input;
  std::vector<int32_t> topk_ids;
  std::vector<uint16_t> topk_weights;
  std::vector<uint8_t> w13, w13_sf, w2, w2_sf;
  std::vector<float> input_scale, fc1_alpha, fc2_input_scale, fc2_alpha;
  std::vector<float> situ_beta, situ_linear_beta;

  Arguments arguments() const {
    Arguments a;
    a.shape = shape;
    a.num_tokens = num_tokens;
    a.input = input.data();
    a.input_stride = shape.hidden;
    a.topk_ids = topk_ids.data();
    a.topk_weights = topk_weights.data();
    a.w13 = w13.data();
    a.w13_sf = w13_sf.data();
    a.w2 = w2.data();
    a.w2_sf = w2_sf.data();
    a.input_scale = input_scale.data();
    a.fc1_alpha = fc1_alpha.data();
    a.fc2_input_scale = fc2_input_scale.data();
    a.fc2_alpha = fc2_alpha.data();
    return a;
  }
};

inline Operands golden_operands() {
  const auto floats = [](const char* key) { return golden<float>("tiny_op_model", key); };
  const auto bytes = [](const char* key) { return golden<uint8_t>("tiny_op_model", key); };
  Operands o{.shape = {128, 64, 4, 3}, .num_tokens = 5};
  o.input = golden<uint16_t>("tiny_op_model", "x_bf16");
  o.topk_ids = golden<int32_t>("tiny_op_model", "ids");
  o.topk_weights = golden<uint16_t>("tiny_op_model", "route_w_bf16");
  o.w13 = bytes("w1");
  o.w13_sf = bytes("s1");
  o.w2 = bytes("w2p");
  o.w2_sf = bytes("s2");
  o.input_scale = floats("qx");
  o.fc1_alpha = floats("dec1");
  o.fc2_input_scale = floats("qa");
  o.fc2_alpha = floats("dec2");
  o.situ_beta.assign(4, kDefaultSituBeta);
  o.situ_linear_beta.assign(4, kDefaultSituLinearBeta);
  return o;
}

// Random codes, block scales of about 2^-5 .. 2^1, ids in [-1, E] (so that some slots are empty).
inline Operands random_operands(Shape shape, int32_t num_tokens, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  const auto bytes = [&](size_t count, uint32_t low, uint32_t high) {
    std::vector<uint8_t> out(count);
    for (auto& byte : out) {
      byte = static_cast<uint8_t>(low + rng() % (high - low + 1));
    }
    return out;
  };
  const auto floats = [&](size_t count, float center) {
    std::vector<float> out(count);
    for (auto& value : out) {
      value = center * std::exp2(0.5f * normal(rng));
    }
    return out;
  };
  const size_t h = shape.hidden, i = shape.intermediate, e = shape.num_experts;
  const size_t pairs = static_cast<size_t>(num_tokens) * shape.top_k;
  Operands o{.shape = shape, .num_tokens = num_tokens};
  for (size_t n = 0; n < num_tokens * h; ++n) {
    o.input.push_back(float_to_bf16(normal(rng)));
  }
  for (size_t n = 0; n < pairs; ++n) {
    o.topk_ids.push_back(static_cast<int32_t>(rng() % (e + 2)) - 1);
    o.topk_weights.push_back(float_to_bf16(std::abs(normal(rng))));
  }
  o.w13 = bytes(e * 2 * i * h / 2, 0, 255);
  o.w13_sf = bytes(e * 2 * i * h / 16, 0x10, 0x30);
  o.w2 = bytes(e * h * i / 2, 0, 255);
  o.w2_sf = bytes(e * h * i / 16, 0x10, 0x30);
  o.input_scale = floats(1, 100.0f);
  o.fc1_alpha = floats(e, 0.005f);
  o.fc2_input_scale = floats(e, 20.0f);
  o.fc2_alpha = floats(e, 0.05f);
  o.situ_beta = floats(e, kDefaultSituBeta);
  o.situ_linear_beta = floats(e, kDefaultSituLinearBeta);
  return o;
}

}  // namespace cake::testing
