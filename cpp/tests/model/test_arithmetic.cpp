// The model's arithmetic and decoding on the host, against the definitions of nvfp4.h.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "common/layout.h"
#include "common/tcgen05_layout.h"
#include "tests/model/arithmetic.h"
#include "tests/model/descriptors.h"

namespace cake::model {
namespace {

TEST(ModelArithmetic, CodesAreDoubledExactly) {
  for (uint32_t codes = 0; codes < 0x10000; ++codes) {
    const uint32_t bytes = doubled_e2m1x4(codes);
    for (int i = 0; i < 4; ++i) {
      ASSERT_EQ(static_cast<int8_t>(bytes >> 8 * i), e2m1_twice(codes >> 4 * i & 15)) << codes;
    }
  }
}

TEST(ModelArithmetic, ScalesAreDecodedExactly) {
  for (uint32_t byte = 0; byte < 0x7F; ++byte) {
    EXPECT_EQ(scale_value(byte), e4m3_decode(static_cast<uint8_t>(byte)));
  }
  for (uint32_t byte = 0x7F; byte < 0x100; ++byte) {
    EXPECT_TRUE(std::isnan(scale_value(byte)));
  }
}

TEST(ModelArithmetic, OnlyOurInstructionDescriptors) {
  for (uint32_t n = 8; n <= tcgen05::kMaxN; n += 8) {
    const uint32_t bits = tcgen05::instruction_descriptor(n);
    EXPECT_EQ(decode_instruction(bits), n);
    for (int bit = 0; bit < 32; ++bit) {
      if (bit < 17 || bit > 22) {
        EXPECT_EQ(decode_instruction(bits ^ 1u << bit), 0u) << bit;
      }
    }
  }
  EXPECT_EQ(decode_instruction(tcgen05::instruction_descriptor(0)), 0u);
  EXPECT_EQ(decode_instruction(tcgen05::instruction_descriptor(264)), 0u);
}

TEST(ModelArithmetic, OnlyOurMatrixDescriptors) {
  const uint64_t operand = tcgen05::operand_descriptor(0x8400);
  const uint64_t scales = tcgen05::scale_descriptor(0x8210);
  for (int step = 0; step < 4; ++step) {
    EXPECT_TRUE(valid_operand(decode_matrix(tcgen05::advance(operand, step * 32))));
  }
  EXPECT_FALSE(valid_operand(decode_matrix(tcgen05::advance(operand, 128))));
  EXPECT_FALSE(valid_operand(decode_matrix(tcgen05::advance(operand, 16))));
  EXPECT_FALSE(valid_operand(decode_matrix(scales)));
  EXPECT_TRUE(valid_scales(decode_matrix(scales)));
  EXPECT_FALSE(valid_scales(decode_matrix(operand)));
  for (int bit : {14, 15, 30, 31, 46, 47, 48, 49, 50, 51, 52, 53, 60, 61, 62, 63}) {
    EXPECT_FALSE(valid_operand(decode_matrix(operand ^ 1ull << bit))) << bit;
    EXPECT_FALSE(valid_scales(decode_matrix(scales ^ 1ull << bit))) << bit;
  }
}

// 128 x N x 256 out of swizzled shared memory, as the engine computes it.
TEST(ModelArithmetic, ProductMatchesSumsInDouble) {
  constexpr int kN = 40;
  constexpr uint32_t kA = 1024, kB = kA + 128 * 128;
  std::mt19937 random(7);
  std::vector<uint8_t> shared(kB + kN * 128);
  std::vector<uint8_t> scales((128 + kN) * 16);
  for (uint8_t& byte : shared) {
    byte = static_cast<uint8_t>(random());
  }
  for (uint8_t& byte : scales) {
    byte = static_cast<uint8_t>(random() % 0x7F);
  }
  const auto value = [&](uint32_t base, int row, int k) {
    const uint8_t pair = shared[base + tcgen05::operand_offset(row, k)];
    return 0.5 * e2m1_twice(k % 2 == 0 ? pair & 15 : pair >> 4);
  };
  const auto load = [&](uint32_t base, int row, int step, Row& decoded) {
    const Matrix m = decode_matrix(tcgen05::operand_descriptor(base + step * 32));
    uint32_t codes[8];
    for (uint32_t i = 0; i < 8; ++i) {
      const uint8_t* const at = &shared[operand_chunk(m, row, i / 4) + i % 4 * 4];
      codes[i] = at[0] | at[1] << 8 | at[2] << 16 | static_cast<uint32_t>(at[3]) << 24;
    }
    decode_row(codes, decoded);
  };
  for (int row = 0; row < 128; row += 5) {
    for (int n = 0; n < kN; ++n) {
      double expected = 0, magnitude = 0;
      float sum = 0;
      for (int step = 0; step < 4; ++step) {
        uint32_t a_scale = 0, b_scale = 0;
        for (int group = 0; group < 4; ++group) {
          const uint8_t sa = scales[row * 16 + step * 4 + group];
          const uint8_t sb = scales[(128 + n) * 16 + step * 4 + group];
          a_scale |= static_cast<uint32_t>(sa) << 8 * group;
          b_scale |= static_cast<uint32_t>(sb) << 8 * group;
          for (int i = 0; i < 16; ++i) {
            const int k = step * 64 + group * 16 + i;
            const double product =
                value(kA, row, k) * value(kB, n, k) * e4m3_decode(sa) * e4m3_decode(sb);
            expected += product;
            magnitude += std::abs(product);
          }
        }
        Row a, b;
        load(kA, row, step, a);
        load(kB, n, step, b);
        for (int group = 0; group < 4; ++group) {
          sum = add_group(sum, a, [&](int word) { return b.words[word]; }, a_scale, b_scale, group);
        }
      }
      ASSERT_LE(std::abs(sum - expected), 1e-6 * magnitude) << row << " " << n;
    }
  }
}

// Two 16x256b loads give a thread four consecutive features of the prepared order.
TEST(ModelArithmetic, LoadsGiveConsecutiveFeatures) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const tcgen05::Position at = tcgen05::position_16x256b(lane, i % 2 * 2);
      EXPECT_EQ(fc2_logical_row(at.lane + i / 2 * 16), 4 * (lane / 4) + i);
    }
  }
}

}  // namespace
}  // namespace cake::model
