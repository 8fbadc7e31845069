// A layer of Kimi-K3's geometry of whose 896 experts a few have weights, batches of tokens that are
// routed to them, and what the CPU path makes of those. Host only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "common/nvfp4.h"
#include "cpu/stages.h"
#include "workspace.h"

namespace cake::model {

inline constexpr int32_t kLiveExperts = 40;  // the first and the last of all among them
inline constexpr Shape kLiveShape{kKimiK3.hidden, kKimiK3.intermediate, kLiveExperts,
                                  kKimiK3.top_k};

constexpr int32_t live_expert(int32_t i) {
  return i * (kKimiK3.num_experts - 1) / (kLiveExperts - 1);
}

// SplitMix64.
class RandomBits {
 public:
  explicit RandomBits(uint64_t seed) : state_(seed) {}
  uint32_t operator()() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return static_cast<uint32_t>(z >> 32);
  }
  uint32_t below(uint32_t bound) { return (*this)() % bound; }

 private:
  uint64_t state_;
};

// Weights of the live experts, in order; as in src/cake/testing/synthetic.py gates and ups of about
// 2, outputs of a few units, factors that differ between neighbours.
struct LiveLayer {
  std::vector<uint8_t> w13, w13_sf, w2, w2_sf;
  std::vector<float> fc1_alpha, fc2_input_scale, fc2_alpha;
  float input_scale = 244.0f;

  LiveLayer() {
    constexpr int64_t kWeights = int64_t{kLiveExperts} * kKimiK3.hidden * kKimiK3.intermediate;
    constexpr float kRms = 3.391f;  // of codes times scales
    RandomBits random(1);
    const auto codes = [&](std::vector<uint8_t>& bytes, int64_t count) {
      bytes.resize(count / 2);
      std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<uint8_t>(random()); });
    };
    const auto scales = [&](std::vector<uint8_t>& bytes, int64_t count) {
      bytes.resize(count / kGroupSize);
      std::generate(bytes.begin(), bytes.end(),
                    [&] { return static_cast<uint8_t>(0x30 + random.below(16)); });
      for (int i = 0; i < 1000; ++i) {
        bytes[random.below(static_cast<uint32_t>(bytes.size()))] = 0;
      }
    };
    codes(w13, 2 * kWeights);
    scales(w13_sf, 2 * kWeights);
    codes(w2, kWeights);
    scales(w2_sf, kWeights);
    for (int32_t i = 0; i < kLiveExperts; ++i) {
      const float spread = 1.0f + static_cast<float>(i % 7) / 16.0f;
      const float q = 26.88f / spread;
      fc1_alpha.push_back(spread * 2.0f / std::sqrt(3584.0f) / kRms / input_scale);
      fc2_input_scale.push_back(q);
      fc2_alpha.push_back((2.0f - spread) * 5.0f / std::sqrt(384.0f) / kRms / q);
    }
  }
};

// The groups of a token differ so much that FC1's sums of floats depend on their order.
struct Batch {
  static constexpr int32_t kHidden = kKimiK3.hidden;
  static constexpr int32_t kTopK = kKimiK3.top_k;
  int32_t num_tokens;
  std::vector<uint16_t> input;    // [T, H]
  std::vector<int32_t> ids;       // [T, k]
  std::vector<uint16_t> weights;  // [T, k]

  // `expert(token, slot)`: index of a live expert, or an id that is none if negative or large.
  template <class Expert>
  Batch(int32_t tokens, uint32_t seed, const Expert& expert) : num_tokens(tokens) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    float gain = 0;
    for (int64_t i = 0; i < int64_t{tokens} * kHidden; ++i) {
      gain = i % kGroupSize == 0 ? std::ldexp(2.0f, -static_cast<int>(random() % 9)) : gain;
      input.push_back(float_to_bf16(gain * normal(random)));
    }
    for (int32_t pair = 0; pair < tokens * kTopK; ++pair) {
      const int32_t i = expert(pair / kTopK, pair % kTopK);
      ids.push_back(i >= 0 && i < kLiveExperts ? live_expert(i) : i);
      weights.push_back(float_to_bf16(0.02f + 0.001f * static_cast<float>(random() % 85)));
    }
  }

  Batch part(int32_t first, int32_t count) const {
    Batch out = *this;
    out.num_tokens = count;
    const auto cut = [=](auto& values, int64_t columns) {
      values = {values.begin() + first * columns, values.begin() + (first + count) * columns};
    };
    cut(out.input, kHidden);
    cut(out.ids, kTopK);
    cut(out.weights, kTopK);
    return out;
  }
  // The tokens from `first` on become those of `other`.
  void replace(int32_t first, const Batch& other) {
    std::copy(other.input.begin(), other.input.end(), input.begin() + int64_t{first} * kHidden);
    std::copy(other.ids.begin(), other.ids.end(), ids.begin() + first * kTopK);
    std::copy(other.weights.begin(), other.weights.end(), weights.begin() + first * kTopK);
  }
};

// Each slot to any live expert, so that many tokens name one twice, or (one in ten) to none. Token
// 2 has a group of NaNs, 4 empty slots only, 5 one expert in all slots, 6 zeros.
inline Batch mixed_batch(int32_t tokens) {
  RandomBits random(2);
  constexpr int32_t kNone[] = {-1, kKimiK3.num_experts, INT32_MIN, INT32_MAX};
  Batch batch(tokens, 3, [&](int32_t token, int32_t) {
    const uint32_t draw = random();
    return token == 4 || draw % 10 == 0 ? kNone[draw / 10 % 4]
           : token == 5                 ? 7
                                        : static_cast<int32_t>(draw / 10 % kLiveExperts);
  });
  const auto fill = [&](int64_t token, int64_t first, int64_t count, uint16_t value) {
    if (token < tokens) {
      std::fill_n(batch.input.begin() + token * Batch::kHidden + first, count, value);
    }
  };
  fill(2, 1600, kGroupSize, 0x7FC0);
  fill(6, 0, Batch::kHidden, 0);
  return batch;
}

// All slots to one expert.
inline Batch one_expert_batch(int32_t tokens) {
  return {tokens, 4, [](int32_t, int32_t) { return 23; }};
}

// Every token to the same 16 experts.
inline Batch sixteen_experts_batch(int32_t tokens) {
  return {tokens, 5, [](int32_t token, int32_t slot) { return (token + slot) % 16 * 2 + 1; }};
}

// Of each token's slots one is not empty; four experts.
inline Batch sparse_batch(int32_t tokens) {
  return {tokens, 6,
          [](int32_t token, int32_t slot) { return slot == token / 4 % 16 ? token % 4 * 13 : -1; }};
}

// What the CPU path makes of a batch.
struct Expected {
  struct Free {
    void operator()(uint8_t* memory) const { std::free(memory); }
  };
  std::unique_ptr<uint8_t, Free> workspace;
  WorkspacePointers regions;  // as the CPU path leaves them
  std::vector<uint16_t> output;

  Expected(const LiveLayer& layer, const Batch& batch)
      : workspace(static_cast<uint8_t*>(
            std::aligned_alloc(128, workspace_bytes(kLiveShape, batch.num_tokens)))),
        regions(workspace.get(), Workspace(kLiveShape, batch.num_tokens)),
        output(batch.input.size()) {
    std::vector<int32_t> places(kKimiK3.num_experts, -1);
    for (int32_t i = 0; i < kLiveExperts; ++i) {
      places[live_expert(i)] = i;
    }
    std::vector<int32_t> ids;
    for (const int32_t id : batch.ids) {
      ids.push_back(id >= 0 && id < kKimiK3.num_experts ? places[id] : -1);
    }
    const std::vector<float> beta(kLiveExperts, kDefaultSituBeta);
    const std::vector<float> linear_beta(kLiveExperts, kDefaultSituLinearBeta);
    Arguments a;
    a.shape = kLiveShape;
    a.num_tokens = batch.num_tokens;
    a.input = batch.input.data();
    a.input_stride = kLiveShape.hidden;
    a.topk_ids = ids.data();
    a.topk_weights = batch.weights.data();
    a.w13 = layer.w13.data();
    a.w13_sf = layer.w13_sf.data();
    a.w2 = layer.w2.data();
    a.w2_sf = layer.w2_sf.data();
    a.input_scale = &layer.input_scale;
    a.fc1_alpha = layer.fc1_alpha.data();
    a.fc2_input_scale = layer.fc2_input_scale.data();
    a.fc2_alpha = layer.fc2_alpha.data();
    a.situ_beta = beta.data();
    a.situ_linear_beta = linear_beta.data();
    a.output = output.data();
    a.workspace = workspace.get();
    cpu::fused_moe(a);
  }

  int32_t num_slots() const { return regions.expert_offsets[kLiveExperts]; }
};

}  // namespace cake::model
