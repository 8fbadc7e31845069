// Every stage of the CPU path against the golden operation.
#include <gtest/gtest.h>

#include <cmath>

#include "common/situ.h"
#include "cpu/block_dot.h"
#include "cpu/parallel.h"
#include "cpu/stages.h"
#include "tiny_layer.h"
#include "workspace.h"

namespace cake::cpu {
namespace {

using testing::golden;
using testing::golden_operands;

constexpr int32_t kPairs = 15;  // 5 tokens, 3 slots

struct Stages : ::testing::Test {
  const testing::Operands o = golden_operands();
  const CpuExecutor& executor = default_executor();
  std::vector<int32_t> offsets = std::vector<int32_t>(5), pairs = std::vector<int32_t>(kPairs);

  Route routed() {
    route({o.topk_ids.data(), IdType::kInt32, kPairs, 4, offsets.data(), pairs.data()});
    return {offsets.data(), pairs.data()};
  }
};

TEST_F(Stages, Quantize) {
  std::vector<uint8_t> packed(5 * 64), sf(5 * 8);
  quantize({.input = o.input.data(),
            .rows = 5,
            .columns = 128,
            .input_stride = 128,
            .input_scale = o.input_scale.data(),
            .packed = packed.data(),
            .sf = sf.data()},
           executor);
  EXPECT_EQ(packed, golden<uint8_t>("tiny_op_model", "x_packed"));
  EXPECT_EQ(sf, golden<uint8_t>("tiny_op_model", "x_sf"));
}

TEST_F(Stages, Fc1SituRequantize) {
  const auto x_packed = golden<uint8_t>("tiny_op_model", "x_packed");
  const auto x_sf = golden<uint8_t>("tiny_op_model", "x_sf");
  std::vector<uint8_t> packed(kPairs * 32, 0xAA), sf(kPairs * 4, 0xAA);
  std::vector<float> activation(kPairs * 64);
  fc1({.shape = o.shape,
       .route = routed(),
       .input = {x_packed.data(), x_sf.data()},
       .w13 = o.w13.data(),
       .w13_sf = o.w13_sf.data(),
       .fc1_alpha = o.fc1_alpha.data(),
       .fc2_input_scale = o.fc2_input_scale.data(),
       .situ_beta = o.situ_beta.data(),
       .situ_linear_beta = o.situ_linear_beta.data(),
       .packed = packed.data(),
       .sf = sf.data(),
       .activation = activation.data()},
      executor);
  const auto expected = golden<float>("tiny_op_model", "act");
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(activation[i], expected[i], 2e-6f * std::fabs(expected[i]) + 1e-7f) << i;
  }
  EXPECT_EQ(sf, golden<uint8_t>("tiny_op_model", "inter_sf"));
  EXPECT_EQ(packed, golden<uint8_t>("tiny_op_model", "inter_packed"));
}

TEST_F(Stages, Fc2AndFinalize) {
  const auto packed = golden<uint8_t>("tiny_op_model", "inter_packed");
  const auto sf = golden<uint8_t>("tiny_op_model", "inter_sf");
  std::vector<uint16_t> rows(kPairs * kFc2BlockRows, 0x7FC0), output(5 * 128, 0x7FC0);
  fc2({.shape = o.shape,
       .route = routed(),
       .intermediate = {packed.data(), sf.data()},
       .w2 = o.w2.data(),
       .w2_sf = o.w2_sf.data(),
       .fc2_alpha = o.fc2_alpha.data(),
       .first_row = 0,
       .rows = rows.data()},
      executor);
  EXPECT_EQ(rows, golden<uint16_t>("tiny_op_model", "rows_bf16"));
  finalize({.shape = o.shape,
            .num_tokens = 5,
            .topk_ids = o.topk_ids.data(),
            .topk_ids_type = IdType::kInt32,
            .topk_weights = o.topk_weights.data(),
            .topk_weights_type = WeightType::kBFloat16,
            .first_row = 0,
            .rows = rows.data(),
            .output = output.data()},
           executor);
  EXPECT_EQ(output, golden<uint16_t>("tiny_op_model", "out_bf16"));
}

TEST(BlockDot, EqualsAPlainDoubleSum) {
  const Shape shape{3584, 384, 2, 1};
  const testing::Operands o = testing::random_operands(shape, 3, 11);
  std::vector<uint8_t> packed(3 * 1792), sf(3 * 224);
  quantize({.input = o.input.data(),
            .rows = 3,
            .columns = 3584,
            .input_stride = 3584,
            .input_scale = o.input_scale.data(),
            .packed = packed.data(),
            .sf = sf.data()},
           default_executor());
  QuantizedRow inputs[3];
  for (int i = 0; i < 3; ++i) {
    inputs[i] = {packed.data() + i * 1792, sf.data() + i * 224};
  }
  const int32_t first_row = 736;
  double sums[kBlockInputs][kBlockRows];
  block_dot({o.w13.data(), o.w13_sf.data(), 3584}, first_row, inputs, 3, sums);

  constexpr double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0., -0.5, -1, -1.5, -2, -3, -4, -6};
  const auto nibble = [](const uint8_t* row, int k) { return row[k / 2] >> 4 * (k % 2) & 15; };
  for (int r = 0; r < kBlockRows; ++r) {
    const int n = first_row + r;
    for (int i = 0; i < 3; ++i) {
      double expected = 0;
      for (int k = 0; k < 3584; ++k) {
        const int c = k / 16;  // the interleave, spelled out: 128x4 blocks of 512 bytes
        const int offset = (n / 128 * 56 + c / 4) * 512 + n % 32 * 16 + n % 128 / 32 * 4 + c % 4;
        expected += kValues[nibble(o.w13.data() + n * 1792, k)] * e4m3_decode(o.w13_sf[offset]) *
                    kValues[nibble(inputs[i].packed, k)] * e4m3_decode(inputs[i].sf[c]);
      }
      ASSERT_EQ(sums[i][r], expected) << r << ' ' << i;
    }
  }
}

TEST(Situ, ValuesLimitsAndNaN) {
  EXPECT_EQ(situ(0.0f, 5.0f, 4.0f, 25.0f), 0.0f);
  EXPECT_NEAR(situ(1.0f, 1.0f, 4.0f, 25.0f), 0.715818, 1e-6);
  EXPECT_FLOAT_EQ(situ(1e30f, 1e30f, 4.0f, 25.0f), 100.0f);
  EXPECT_EQ(situ(-1e30f, 1e30f, 4.0f, 25.0f), -0.0f);
  EXPECT_TRUE(std::isnan(situ(NAN, 1.0f, 4.0f, 25.0f)));
  EXPECT_TRUE(std::isnan(situ(1.0f, NAN, 4.0f, 25.0f)));
}

}  // namespace
}  // namespace cake::cpu
