// The toy product by the model, against sums in double precision.
#include <cmath>
#include <random>

#include "common/layout.h"
#include "common/nvfp4.h"
#include "tensor_map.h"
#include "tests/model/harness.h"
#include "tests/model/toy_gemm.h"

namespace cake::model {
namespace {

using toy::kK;
using toy::kRows;

// Codes and scales of a matrix with kK columns.
struct Matrix {
  std::vector<uint8_t> codes, scales;

  Matrix(int rows, std::mt19937& random) : codes(rows * kK / 2), scales(rows * kK / 16) {
    for (uint8_t& byte : codes) {
      byte = static_cast<uint8_t>(random());
    }
    for (uint8_t& byte : scales) {
      byte = static_cast<uint8_t>(0x28 + random() % 0x20);
    }
  }
  double at(int row, int k) const {
    const uint8_t pair = codes[(row * kK + k) / 2];
    return 0.5 * e2m1_twice(k % 2 == 0 ? pair & 15 : pair >> 4) *
           e4m3_decode(scales[(row * kK + k) / 16]);
  }
};

class ToyGemm : public ModelTest {};

TEST_F(ToyGemm, MatchesReference) {
  constexpr int kExperts = 3;
  constexpr int kTokens = 20;
  std::mt19937 random(1);
  const Matrix weights(kExperts * kRows, random), tokens(kTokens, random);
  const std::vector<Tile> tiles = {
      {0, 0, 16, 0}, {2, 16, 9, 0}, {1, 25, 1, 0}, {0, 26, 8, 0}, {2, 34, 16, 0}};
  const int pairs = tiles.back().first + tiles.back().count;
  std::vector<int32_t> token_ids(pairs);
  for (int32_t& id : token_ids) {
    id = static_cast<int32_t>(random() % kTokens);
  }
  std::vector<uint8_t> weight_sf(weights.scales.size());
  for (int row = 0; row < kExperts * kRows; ++row) {
    for (int c = 0; c < kK / 16; ++c) {
      weight_sf[scale_offset(row, c, kK / 16)] = weights.scales[row * (kK / 16) + c];
    }
  }

  const DeviceMemory codes(weights.codes), scales(weight_sf);
  const DeviceMemory out(int64_t{pairs} * kRows * 4);
  LateInputs inputs;
  toy::Params params{};
  params.weight_sf = scales.as();
  params.tiles = inputs.add(tiles);
  params.token_ids = inputs.add(token_ids);
  params.token_sf = inputs.add(tokens.scales);
  params.out = out.as<float>();
  params.num_tiles = static_cast<int32_t>(tiles.size());
  params.num_tokens = kTokens;
  ASSERT_TRUE(
      make_swizzled_byte_map(codes.as(), kExperts * kRows, kK / 2, kRows, &params.weights).ok());
  ASSERT_TRUE(
      make_swizzled_byte_map(inputs.add(tokens.codes), kTokens, kK / 2, 1, &params.tokens).ok());

  const auto launch = [&]() -> Status {
    out.fill(0xFF);
    CAKE_RETURN_IF_ERROR(inputs.launch());
    return launch_toy_gemm(params, 2);
  };
  std::vector<double> sums, magnitudes;  // of each pair and row
  for (const Tile& tile : tiles) {
    for (int pair = tile.first; pair < tile.first + tile.count; ++pair) {
      for (int row = 0; row < kRows; ++row) {
        double sum = 0, magnitude = 0;
        for (int k = 0; k < kK; ++k) {
          const double product =
              weights.at(tile.expert * kRows + row, k) * tokens.at(token_ids[pair], k);
          sum += product;
          magnitude += std::abs(product);
        }
        sums.push_back(sum);
        magnitudes.push_back(magnitude);
      }
    }
  }
  const auto verify = [&] {
    const auto got = out.download<float>();
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_LE(std::abs(got[i] - sums[i]), 1e-6 * magnitudes[i])
          << "pair " << i / kRows << ", row " << i % kRows;
    }
  };
  run(launch, verify);
}

}  // namespace
}  // namespace cake::model
