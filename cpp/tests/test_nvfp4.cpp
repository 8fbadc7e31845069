#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "common/nvfp4.h"
#include "cpu/parallel.h"
#include "cpu/stages.h"
#include "npy.h"

namespace cake {
namespace {

using testing::golden;

TEST(Nvfp4, E2m1EncodeMatchesGolden) {
  const auto input = golden<float>("formats", "e2m1_in");
  const auto code = golden<uint8_t>("formats", "e2m1_code");
  ASSERT_EQ(input.size(), code.size());
  for (size_t i = 0; i < input.size(); ++i) {
    EXPECT_EQ(e2m1_encode(input[i]), code[i]) << input[i];
  }
}

TEST(Nvfp4, E2m1EncodeTakesTheNearestValueForEveryBf16) {
  constexpr float kValues[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = bf16_to_float(static_cast<uint16_t>(bits));
    const uint32_t code = e2m1_encode(value);
    if (std::isnan(value)) {
      EXPECT_EQ(code, 7u);
      continue;
    }
    EXPECT_EQ(code >> 3, bits >> 15) << value;
    const float magnitude = std::min(std::fabs(value), 6.0f);
    const float error = std::fabs(kValues[code & 7] - magnitude);
    for (uint32_t other = 0; other < 8; ++other) {
      const float alternative = std::fabs(kValues[other] - magnitude);
      EXPECT_TRUE(error < alternative ||
                  (error == alternative && ((code & 1) == 0 || other == (code & 7))))
          << value << " code " << code << " other " << other;
    }
    EXPECT_EQ(e2m1_twice(code), static_cast<int32_t>(2 * kValues[code & 7]) * (code >= 8 ? -1 : 1));
  }
}

TEST(Nvfp4, E4m3EncodeMatchesGolden) {
  const auto input = golden<float>("formats", "e4m3_in");
  const auto byte = golden<uint8_t>("formats", "e4m3_byte");
  ASSERT_EQ(input.size(), byte.size());
  for (size_t i = 0; i < input.size(); ++i) {
    if (!std::signbit(input[i])) {  // block scales are magnitudes
      EXPECT_EQ(e4m3_encode(input[i]), byte[i]) << input[i];
    }
  }
}

TEST(Nvfp4, E4m3RoundTripAndTies) {
  for (uint32_t byte = 0; byte < 0x7F; ++byte) {
    const float value = e4m3_decode(static_cast<uint8_t>(byte));
    EXPECT_EQ(e4m3_encode(value), byte);
    if (byte < 0x7E) {  // halfway to the next: the even byte
      const float next = e4m3_decode(static_cast<uint8_t>(byte + 1));
      const float middle = value + (next - value) / 2;
      EXPECT_EQ(e4m3_encode(middle), byte + (byte & 1)) << byte;
      EXPECT_EQ(e4m3_encode(std::nextafterf(middle, 0.0f)), byte) << byte;
      EXPECT_EQ(e4m3_encode(std::nextafterf(middle, 1e9f)), byte + 1) << byte;
    }
  }
  EXPECT_EQ(e4m3_encode(std::numeric_limits<float>::infinity()), 0x7E);
  EXPECT_EQ(e4m3_encode(464.0f), 0x7E);
  EXPECT_EQ(e4m3_encode(std::numeric_limits<float>::quiet_NaN()), 0x7F);
  EXPECT_TRUE(std::isnan(e4m3_decode(0x7F)));
  EXPECT_EQ(e4m3_decode(0xC8), -4.0f);
}

TEST(Nvfp4, Bf16RoundsToNearestEven) {
  EXPECT_EQ(float_to_bf16(bits_float(0x3F808000)), 0x3F80);  // tie, even stays
  EXPECT_EQ(float_to_bf16(bits_float(0x3F818000)), 0x3F82);  // tie, odd goes up
  EXPECT_EQ(float_to_bf16(bits_float(0x3F808001)), 0x3F81);
  EXPECT_EQ(float_to_bf16(bits_float(0x7F7FFFFF)), 0x7F80);  // rounds to Inf
  EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(std::nanf("")))));
}

// Recipe P against upstream's CPU reference: zeros, subnormals, NaN, Inf, saturation, ties.
class QuantizePrecise : public ::testing::TestWithParam<int> {};

TEST_P(QuantizePrecise, MatchesGoldenEdgeCases) {
  const std::string suffix = "_" + std::to_string(GetParam());
  const auto input = golden<uint16_t>("quant_edge", "x_bf16_bits");
  const auto scale = golden<float>("quant_edge", "gs" + suffix);
  const auto packed = golden<uint8_t>("quant_edge", "packed" + suffix);
  const auto sf = golden<uint8_t>("quant_edge", "sf" + suffix);
  std::vector<uint8_t> actual_packed(packed.size(), 0xAA), actual_sf(sf.size(), 0xAA);
  cpu::quantize({.input = input.data(),
                 .rows = 16,
                 .columns = 64,
                 .input_stride = 64,
                 .input_scale = scale.data(),
                 .packed = actual_packed.data(),
                 .sf = actual_sf.data()},
                cpu::default_executor());
  EXPECT_EQ(actual_packed, packed);
  EXPECT_EQ(actual_sf, sf);
}

INSTANTIATE_TEST_SUITE_P(Scales, QuantizePrecise, ::testing::Range(0, 4));

// Recipe Q' against the model of upstream's epilogue.
class QuantizeIntermediate : public ::testing::TestWithParam<int> {};

TEST_P(QuantizeIntermediate, MatchesGolden) {
  const std::string suffix = "_" + std::to_string(GetParam());
  const auto activation = golden<float>("quant_intermediate_model", "act");
  const float q = golden<float>("quant_intermediate_model", "qa" + suffix)[0];
  const auto packed = golden<uint8_t>("quant_intermediate_model", "packed" + suffix);
  const auto sf = golden<uint8_t>("quant_intermediate_model", "sf" + suffix);
  ASSERT_EQ(activation.size(), sf.size() * 16);
  for (size_t group = 0; group < sf.size(); ++group) {
    const float* values = activation.data() + group * 16;
    float amax = max_magnitude(values[0], values[0]);
    for (int i = 1; i < 16; ++i) {
      amax = max_magnitude(amax, values[i]);
    }
    const BlockScale scale = block_scale_intermediate(amax, q);
    ASSERT_EQ(scale.sf, sf[group]) << group;
    for (int i = 0; i < 16; ++i) {
      const uint32_t byte = packed[group * 8 + i / 2];
      ASSERT_EQ(encode_intermediate(values[i], scale, q), i % 2 ? byte >> 4 : byte & 15)
          << group << ' ' << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Scales, QuantizeIntermediate, ::testing::Range(0, 3));

TEST(Quantize, StridedRowsEqualContiguousOnes) {
  const auto input = golden<uint16_t>("quant_edge", "x_bf16_bits");
  std::vector<uint16_t> strided(16 * 100, 0x7FC0);  // NaN between the rows
  for (int row = 0; row < 16; ++row) {
    std::copy_n(input.data() + row * 64, 64, strided.data() + row * 100 + 3);
  }
  const float q = 1.0f;
  std::vector<uint8_t> packed[2], sf[2];
  for (int i = 0; i < 2; ++i) {
    packed[i].resize(16 * 32);
    sf[i].resize(16 * 4);
    ASSERT_TRUE(quantize_nvfp4({.input = i == 0 ? input.data() : strided.data() + 3,
                                .rows = 16,
                                .columns = 64,
                                .input_stride = i == 0 ? 64 : 100,
                                .input_scale = &q,
                                .packed = packed[i].data(),
                                .sf = sf[i].data()})
                    .ok());
  }
  EXPECT_EQ(packed[0], packed[1]);
  EXPECT_EQ(sf[0], sf[1]);
}

TEST(Quantize, RefusesColumnsThatAreNoMultipleOf16) {
  const Status status = quantize_nvfp4({.rows = 1, .columns = 24});
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("multiple of 16, got [1, 24]"), std::string::npos);
}

}  // namespace
}  // namespace cake
