// cake_fc1_sm100 by the model, at its real K and a few experts, against the exact CPU stage.
#include <algorithm>
#include <numeric>
#include <random>
#include <string>

#include "common/nvfp4.h"
#include "cpu/parallel.h"
#include "cpu/stages.h"
#include "fc1/launch.h"
#include "tests/model/compare.h"
#include "tests/model/harness.h"

namespace cake::model {
namespace {

constexpr int kExperts = 3;
constexpr int kTokens = 40;
constexpr int kCtas = 5;  // more items each than accumulators
constexpr Shape kShape{kKimiK3.hidden, kKimiK3.intermediate, kExperts, kKimiK3.top_k};
constexpr int kPairs = kTokens * kShape.top_k;
constexpr int kPackedBytes = kShape.intermediate / 2;
constexpr int kGroups = kShape.intermediate / kGroupSize;
constexpr uint8_t kUntouched = 0xA5;

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  int between(int low, int high) { return std::uniform_int_distribution(low, high)(engine_); }
  std::vector<uint8_t> bytes(int64_t count, int low, int high) {
    std::vector<uint8_t> values(count);
    std::generate(values.begin(), values.end(),
                  [&] { return static_cast<uint8_t>(between(low, high)); });
    return values;
  }
  std::vector<float> floats(float low, float high) {
    std::vector<float> values(kExperts);
    std::generate(values.begin(), values.end(),
                  [&] { return std::uniform_real_distribution<float>(low, high)(engine_); });
    return values;
  }
  std::vector<int32_t> permutation(int count) {
    std::vector<int32_t> values(count);
    std::iota(values.begin(), values.end(), 0);
    std::shuffle(values.begin(), values.end(), engine_);
    return values;
  }

 private:
  std::mt19937 engine_;
};

// Operands with gates and ups of a few units; a few groups have a zero scale.
struct Operands {
  Random random{7};
  std::vector<uint8_t> w13 =
      random.bytes(int64_t{kExperts} * 2 * kShape.intermediate * kShape.hidden / 2, 0, 255);
  std::vector<uint8_t> w13_sf = random.bytes(
      int64_t{kExperts} * 2 * kShape.intermediate * kShape.hidden / kGroupSize, 0x34, 0x3C);
  std::vector<uint8_t> input = random.bytes(kTokens * kShape.hidden / 2, 0, 255);
  std::vector<uint8_t> input_sf = random.bytes(kTokens * kShape.hidden / kGroupSize, 0x34, 0x3C);
  std::vector<float> alpha = random.floats(0.002f, 0.006f);
  std::vector<float> q_scale = random.floats(1.0f, 26.0f);
  std::vector<float> beta = random.floats(3.0f, 5.0f);
  std::vector<float> linear_beta = random.floats(20.0f, 30.0f);

  Operands() {
    for (int i = 0; i < 40; ++i) {
      input_sf[random.between(0, static_cast<int>(input_sf.size()) - 1)] = 0;
      w13_sf[random.between(0, static_cast<int>(w13_sf.size()) - 1)] = 0;
    }
  }
};

// Tiles with these counts, in order of their experts, of different pairs.
struct Routing {
  std::vector<Tile> tiles;
  std::vector<int32_t> expert_offsets = std::vector<int32_t>(kExperts + 1);
  std::vector<int32_t> expert_pairs;

  Routing(const std::vector<int>& counts, Random& random)
      : expert_pairs(random.permutation(kPairs)) {
    int32_t first = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      const auto expert = static_cast<int32_t>(i * kExperts / counts.size());
      tiles.push_back({expert, first, counts[i], 0});
      first += counts[i];
      std::fill(expert_offsets.begin() + expert + 1, expert_offsets.end(), first);
    }
  }
  int32_t slots() const { return expert_offsets.back(); }
};

struct Quantized {
  std::vector<uint8_t> packed = std::vector<uint8_t>(kPairs * kPackedBytes, kUntouched);
  std::vector<uint8_t> sf = std::vector<uint8_t>(kPairs * kGroups, kUntouched);
};

// Rows by pair.
Quantized reference(const Operands& o, const Routing& routing) {
  Quantized out;
  cpu::fc1({.shape = kShape,
            .route = {routing.expert_offsets.data(), routing.expert_pairs.data()},
            .input = {o.input.data(), o.input_sf.data()},
            .w13 = o.w13.data(),
            .w13_sf = o.w13_sf.data(),
            .fc1_alpha = o.alpha.data(),
            .fc2_input_scale = o.q_scale.data(),
            .situ_beta = o.beta.data(),
            .situ_linear_beta = o.linear_beta.data(),
            .packed = out.packed.data(),
            .sf = out.sf.data()},
           cpu::default_executor());
  return out;
}

// Rows by position in expert_pairs, the rest untouched.
void expect_close(const Quantized& got, const Quantized& expected, const Routing& routing) {
  expect_close(compare_rows({got.packed.data(), got.sf.data()},
                            {expected.packed.data(), expected.sf.data()},
                            std::span(routing.expert_pairs).first(routing.slots())));
  const auto untouched = [](const std::vector<uint8_t>& bytes, int64_t from) {
    return std::all_of(bytes.begin() + from, bytes.end(),
                       [](uint8_t b) { return b == kUntouched; });
  };
  EXPECT_TRUE(untouched(got.packed, int64_t{routing.slots()} * kPackedBytes));
  EXPECT_TRUE(untouched(got.sf, int64_t{routing.slots()} * kGroups));
}

class Fc1Sm100 : public ModelTest, public ::testing::WithParamInterface<int32_t> {
 protected:
  void compare(const Operands& operands, const Routing& routing) {
    const DeviceMemory w13(operands.w13), w13_sf(operands.w13_sf), alpha(operands.alpha),
        q_scale(operands.q_scale), beta(operands.beta), linear_beta(operands.linear_beta);
    const DeviceMemory packed(int64_t{kPairs} * kPackedBytes), sf(int64_t{kPairs} * kGroups);
    LateInputs inputs;
    const fc1::Params params{
        .w13 = w13.as(),
        .w13_sf = w13_sf.as(),
        .input = inputs.add(operands.input),
        .input_sf = inputs.add(operands.input_sf),
        .halves = nullptr,
        .tiles = inputs.add(routing.tiles),
        .num_tiles = inputs.add(std::vector{static_cast<int32_t>(routing.tiles.size())}),
        .expert_pairs = inputs.add(routing.expert_pairs),
        .fc1_alpha = alpha.as<float>(),
        .fc2_input_scale = q_scale.as<float>(),
        .situ_beta = beta.as<float>(),
        .situ_linear_beta = linear_beta.as<float>(),
        .packed = packed.as(),
        .sf = sf.as(),
        .num_tokens = kTokens};
    const Plan plan{.kernels = Kernels::kSm100, .tile_pairs = GetParam(), .num_ctas = kCtas};
    ASSERT_TRUE(load_fc1(Architecture::kSm100).ok());
    const Quantized expected = reference(operands, routing);
    run(
        [&]() -> Status {
          packed.fill(kUntouched);
          sf.fill(kUntouched);
          CAKE_RETURN_IF_ERROR(inputs.launch());
          return launch_fc1(params, plan, nullptr);
        },
        [&] {
          const Quantized got{packed.download<uint8_t>(), sf.download<uint8_t>()};
          expect_close(got, expected, routing);
        });
  }
};

TEST_P(Fc1Sm100, MatchesCpuPath) {
  const int32_t most = GetParam();
  std::vector<int> counts;
  for (const int count : {most, 1, 7, 8, 9, most - 1}) {
    if (count <= most) {
      counts.push_back(count);
    }
  }
  Operands operands;
  compare(operands, Routing(counts, operands.random));
}

TEST_P(Fc1Sm100, NaNStaysInItsToken) {
  Operands operands;
  const Routing routing({GetParam(), 3}, operands.random);
  const int32_t token = routing.expert_pairs[1] / kShape.top_k;
  operands.input_sf[token * kShape.hidden / kGroupSize + 100] = kE4m3NaN;
  compare(operands, routing);
}

TEST_P(Fc1Sm100, NoTilesWriteNothing) {
  Operands operands;
  compare(operands, Routing({}, operands.random));
}

INSTANTIATE_TEST_SUITE_P(, Fc1Sm100, ::testing::ValuesIn(kSm100TilePairs),
                         [](const auto& info) { return "N" + std::to_string(info.param); });

}  // namespace
}  // namespace cake::model
