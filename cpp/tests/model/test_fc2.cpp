// cake_fc2_sm100 by the model, against sums in double precision of the same prepared bytes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "common/layout.h"
#include "common/nvfp4.h"
#include "fc2/launch.h"
#include "tests/model/harness.h"

namespace cake::model {
namespace {

constexpr int kHidden = 3584;
constexpr int kIntermediate = 384;
constexpr int kScales = kIntermediate / 16;
constexpr int kExperts = 4;
constexpr int kUnused = 5;               // pairs of no tile: empty slots
constexpr uint16_t kUntouched = 0x5A5A;  // 1.5e16

struct Case {
  int32_t tile_pairs;
  std::vector<int32_t> counts;  // pairs of the tiles
  int32_t num_ctas = 2;
  WorkPool pool = {};
  int32_t first_block = 0;
  int32_t num_blocks = 3;
  int32_t nan_row = -1;  // of the intermediate: one of its scales is NaN
};

// Rows of kIntermediate codes, with their scales in rows.
struct Rows {
  std::vector<uint8_t> codes, scales;

  Rows(int64_t rows, std::mt19937& random)
      : codes(rows * kIntermediate / 2), scales(rows * kScales) {
    for (uint8_t& byte : codes) {
      byte = static_cast<uint8_t>(random());
    }
    for (uint8_t& byte : scales) {
      byte = static_cast<uint8_t>(random() % 16 == 0 ? 0 : 0x28 + random() % 0x20);
    }
  }
  // Values of a row.
  std::vector<double> row(int64_t index) const {
    std::vector<double> values(kIntermediate);
    for (int k = 0; k < kIntermediate; ++k) {
      const uint8_t two = codes[(index * kIntermediate + k) / 2];
      values[k] = 0.5 * e2m1_twice(k % 2 == 0 ? two & 15 : two >> 4) *
                  e4m3_decode(scales[index * kScales + k / 16]);
    }
    return values;
  }
};

class Fc2Sm100 : public ModelTest {
 protected:
  void check(const Case& test) {
    std::mt19937 random(static_cast<uint32_t>(test.tile_pairs + test.counts.size()));
    std::vector<Tile> tiles;
    int32_t used = 0;
    for (const int32_t count : test.counts) {
      ASSERT_LE(count, test.tile_pairs);
      tiles.push_back({static_cast<int32_t>(random() % kExperts), used, count, 0});
      used += count;
    }
    const int32_t pairs = used + kUnused;
    std::vector<int32_t> expert_pairs(pairs);
    std::iota(expert_pairs.begin(), expert_pairs.end(), 0);
    std::shuffle(expert_pairs.begin(), expert_pairs.end(), random);

    const Rows weights(int64_t{kExperts} * kHidden, random);
    Rows tokens(pairs, random);
    if (test.nan_row >= 0) {
      tokens.scales[test.nan_row * kScales + 5] = kE4m3NaN;
    }
    std::vector<uint8_t> w2_sf(weights.scales.size());
    for (int64_t row = 0; row < int64_t{kExperts} * kHidden; ++row) {
      for (int32_t c = 0; c < kScales; ++c) {
        const int64_t expert = row / kHidden;
        w2_sf[expert * kHidden * kScales + scale_offset(row % kHidden, c, kScales)] =
            weights.scales[row * kScales + c];
      }
    }
    const std::vector<float> alpha = {1.0f, 0.37f, -2.5f, 0.0625f};
    const int32_t columns = test.num_blocks * 128;

    const DeviceMemory codes(weights.codes), scales(w2_sf), alphas(alpha), counter(4);
    const DeviceMemory ids(expert_pairs),
        num_tiles(std::vector{static_cast<int32_t>(tiles.size())});
    tiles.push_back({0, 0, 1, 0});  // beyond the end, and device memory for an empty list
    const DeviceMemory list(tiles);
    tiles.pop_back();
    const DeviceMemory rows(int64_t{pairs} * columns * 2);
    LateInputs fc1;
    const fc2::Params params{.w2 = codes.as(),
                             .w2_sf = scales.as(),
                             .input = fc1.add(tokens.codes),
                             .input_sf = fc1.add(tokens.scales),
                             .tiles = list.as<Tile>(),
                             .num_tiles = num_tiles.as<int32_t>(),
                             .expert_pairs = ids.as<int32_t>(),
                             .fc2_alpha = alphas.as<float>(),
                             .rows = rows.as<uint16_t>(),
                             .first_block = test.first_block,
                             .num_blocks = test.num_blocks,
                             .num_pairs = pairs,
                             .pool = test.pool,
                             .work_counter = test.pool.part > 0 ? counter.as<int32_t>() : nullptr};
    const Plan plan{.kernels = Kernels::kSm100,
                    .tile_pairs = test.tile_pairs,
                    .num_ctas = test.num_ctas,
                    .fc2_pool = test.pool};

    const auto launch = [&]() -> Status {
      counter.fill(0);
      rows.upload(std::vector<uint16_t>(static_cast<size_t>(pairs) * columns, kUntouched).data());
      CAKE_RETURN_IF_ERROR(fc1.launch());
      return launch_fc2(params, plan, nullptr);
    };
    // Least and greatest result; the model's sums differ from exact ones by their roundings. Both
    // NaN: the result is NaN; infinite: nothing is written.
    std::vector<float> least(static_cast<size_t>(pairs) * columns, INFINITY), greatest(least);
    for (const Tile& tile : tiles) {
      for (int32_t n = 0; n < columns; ++n) {
        const int32_t row = test.first_block * 128 + n;
        const std::vector<double> w = weights.row(int64_t{tile.expert} * kHidden + row);
        for (int32_t i = tile.first; i < tile.first + tile.count; ++i) {
          const std::vector<double> token = tokens.row(i);
          double sum = 0, magnitude = 0;
          for (int k = 0; k < kIntermediate; ++k) {
            sum += w[k] * token[k];
            magnitude += std::abs(w[k] * token[k]);
          }
          const double factor = alpha[tile.expert];
          const double error = std::abs(factor) * magnitude * 2e-6;
          const size_t at = static_cast<size_t>(expert_pairs[i]) * columns + fc2_logical_row(n);
          least[at] = static_cast<float>(factor * sum - error);
          greatest[at] = static_cast<float>(factor * sum + error);
        }
      }
    }
    const auto verify = [&] {
      const auto got = rows.download<uint16_t>();
      for (size_t at = 0; at < got.size(); ++at) {
        const auto where = [&] {
          return "pair " + std::to_string(at / columns) + ", column " +
                 std::to_string(at % columns);
        };
        if (std::isinf(least[at])) {
          ASSERT_EQ(got[at], kUntouched) << where();
        } else if (std::isnan(least[at])) {
          ASSERT_TRUE(is_nan(bf16_to_float(got[at]))) << where();
        } else {
          ASSERT_GE(bf16_to_float(got[at]), bf16_to_float(float_to_bf16(least[at]))) << where();
          ASSERT_LE(bf16_to_float(got[at]), bf16_to_float(float_to_bf16(greatest[at]))) << where();
        }
      }
      if (test.pool.part > 0) {
        const int32_t blocks = static_cast<int32_t>(tiles.size()) * test.num_blocks;
        const int32_t claims =
            (blocks / test.pool.part + test.pool.claim_blocks - 1) / test.pool.claim_blocks;
        EXPECT_EQ(counter.download<int32_t>()[0], claims + test.num_ctas);
      }
    };
    ASSERT_TRUE(load_fc2(Architecture::kSm100).ok());
    run(launch, verify);
  }
};

TEST_F(Fc2Sm100, Tiles8) { check({.tile_pairs = 8, .counts = {1, 7, 8, 2}}); }
TEST_F(Fc2Sm100, Tiles16) { check({.tile_pairs = 16, .counts = {9, 16, 1, 15, 8}}); }
TEST_F(Fc2Sm100, Tiles32) { check({.tile_pairs = 32, .counts = {7, 31, 32, 1, 17}}); }
TEST_F(Fc2Sm100, Tiles64) { check({.tile_pairs = 64, .counts = {63, 8, 64, 1}}); }
TEST_F(Fc2Sm100, Tiles128) { check({.tile_pairs = 128, .counts = {9, 128, 1, 127, 7}}); }

// More blocks than stages, and tiles cut between CTAs.
TEST_F(Fc2Sm100, ManyBlocks) {
  check({.tile_pairs = 8, .counts = {3, 8, 1}, .num_ctas = 2, .num_blocks = 28});
}

TEST_F(Fc2Sm100, OnePartOfTheColumns) {
  check({.tile_pairs = 16, .counts = {16, 3}, .num_ctas = 3, .first_block = 24, .num_blocks = 4});
}

// More items than descriptions; slots and accumulators come around.
TEST_F(Fc2Sm100, ManyItems) {
  check({.tile_pairs = 8,
         .counts = {1, 2, 3, 4, 5, 6, 7, 8, 8, 7, 6, 5, 4, 3, 2, 1, 8, 1},
         .num_ctas = 1,
         .num_blocks = 1});
}

TEST_F(Fc2Sm100, Pooled) {
  check({.tile_pairs = 8,
         .counts = {1, 8, 2, 7, 5},
         .num_ctas = 3,
         .pool = {.part = 4, .claim_blocks = 1},
         .num_blocks = 7});
}
TEST_F(Fc2Sm100, PooledLargeTiles) {
  check({.tile_pairs = 64,
         .counts = {64, 3, 33, 17},
         .num_ctas = 2,
         .pool = {.part = 4, .claim_blocks = 2},
         .num_blocks = 5});
}

TEST_F(Fc2Sm100, FewerBlocksThanCtas) {
  check({.tile_pairs = 8, .counts = {2}, .num_ctas = 5, .num_blocks = 2});
}
TEST_F(Fc2Sm100, PooledFewerBlocksThanCtas) {
  check({.tile_pairs = 8,
         .counts = {2},
         .num_ctas = 5,
         .pool = {.part = 4, .claim_blocks = 2},
         .num_blocks = 4});
}

// The first row after a tile's is in its boxes, and in a column of its own.
TEST_F(Fc2Sm100, NaNStaysInItsPair) { check({.tile_pairs = 16, .counts = {3, 9}, .nan_row = 3}); }

TEST_F(Fc2Sm100, NoTiles) { check({.tile_pairs = 8, .counts = {}}); }
TEST_F(Fc2Sm100, PooledNoTiles) {
  check({.tile_pairs = 128, .counts = {}, .pool = {.part = 4, .claim_blocks = 1}});
}

}  // namespace
}  // namespace cake::model
