// The public C++ interface on the CPU: the whole operation, prepared state, refusals.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>

#include "cake/fused_moe.h"
#include "cpu/parallel.h"
#include "tiny_layer.h"

namespace cake {
namespace {

using testing::Operands;

constexpr Device kCpu{};

// A workspace of exactly the bytes asked for, poisoned, with guard bytes behind it.
class GuardedWorkspace {
 public:
  GuardedWorkspace(const Shape& shape, int32_t num_tokens, uint8_t poison)
      : bytes_(workspace_bytes(shape, num_tokens)),
        data_(static_cast<uint8_t*>(std::aligned_alloc(128, bytes_ + 128)), &std::free) {
    std::memset(data_.get(), poison, bytes_);
    std::memset(data_.get() + bytes_, 0x5A, 128);
  }
  ~GuardedWorkspace() { release(data_.get(), kCpu); }

  void* data() { return data_.get(); }
  int64_t bytes() const { return bytes_; }
  void poison(uint8_t value) { std::memset(data_.get(), value, bytes_); }
  bool intact() const {
    return std::all_of(data_.get() + bytes_, data_.get() + bytes_ + 128,
                       [](uint8_t byte) { return byte == 0x5A; });
  }

 private:
  int64_t bytes_;
  std::unique_ptr<uint8_t, decltype(&std::free)> data_;
};

std::vector<uint16_t> run_once(const Operands& o, Arguments a, uint8_t poison) {
  GuardedWorkspace workspace(o.shape, o.num_tokens, poison);
  std::vector<uint16_t> output(static_cast<size_t>(o.num_tokens) * o.shape.hidden, 0x7FC0);
  EXPECT_TRUE(
      prepare(o.shape, workspace.data(), workspace.bytes(), o.num_tokens, kCpu, nullptr).ok());
  a.output = output.data();
  a.workspace = workspace.data();
  a.workspace_bytes = workspace.bytes();
  const Status status = run(a);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(workspace.intact());
  return output;
}

TEST(FusedMoe, MatchesTheGoldenOperation) {
  const Operands o = testing::golden_operands();
  EXPECT_EQ(run_once(o, o.arguments(), 0xFF),
            testing::golden<uint16_t>("tiny_op_model", "out_bf16"));
}

TEST(FusedMoe, DoesNotDependOnWorkersOrOnWhatTheWorkspaceHeld) {
  const Operands o = testing::random_operands({256, 128, 8, 4}, 50, 3);
  Arguments a = o.arguments();
  const CpuExecutor serial{1, nullptr};
  a.executor = &serial;
  const auto expected = run_once(o, a, 0x00);
  for (const int32_t workers : {2, 3, 7}) {
    const CpuExecutor executor{workers, cpu::default_executor().run};
    a.executor = &executor;
    EXPECT_EQ(run_once(o, a, static_cast<uint8_t>(0x7F + workers)), expected) << workers;
  }
}

TEST(FusedMoe, RowsDoNotDependOnOtherTokens) {
  Operands o = testing::random_operands({256, 128, 8, 4}, 40, 4);
  const auto all = run_once(o, o.arguments(), 0xFF);
  for (const int32_t token : {0, 17, 39}) {
    Arguments a = o.arguments();
    a.num_tokens = 1;
    a.input = o.input.data() + token * 256;
    a.topk_ids = o.topk_ids.data() + token * 4;
    a.topk_weights = o.topk_weights.data() + token * 4;
    Operands one = o;
    one.num_tokens = 1;
    EXPECT_EQ(run_once(one, a, 0xFF),
              std::vector(all.begin() + token * 256, all.begin() + (token + 1) * 256));
  }
}

TEST(FusedMoe, ManyTokensInChunksGiveTheRowsOfFewer) {
  const int32_t tokens = kMaxTokens - 1;  // two chunks, the second one smaller
  Operands o = testing::random_operands({128, 64, 8, 4}, tokens, 9);
  const std::vector<int64_t> ids(o.topk_ids.begin(), o.topk_ids.end());
  std::vector<float> weights;
  for (const uint16_t weight : o.topk_weights) {
    weights.push_back(bits_float(uint32_t{weight} << 16));
  }
  Arguments a = o.arguments();
  const auto all = run_once(o, a, 0xFF);
  a.topk_ids = ids.data();
  a.topk_ids_type = IdType::kInt64;
  a.topk_weights = weights.data();
  a.topk_weights_type = WeightType::kFloat32;
  EXPECT_EQ(run_once(o, a, 0x00), all);
  Operands few = o;
  few.num_tokens = 50;
  for (const int32_t first : {0, 8192 - 50, 8192, tokens - 50}) {
    Arguments part = o.arguments();
    part.num_tokens = few.num_tokens;
    part.input = o.input.data() + first * 128;
    part.topk_ids = o.topk_ids.data() + first * 4;
    part.topk_weights = o.topk_weights.data() + first * 4;
    EXPECT_EQ(run_once(few, part, 0xFF),
              std::vector(all.begin() + first * 128, all.begin() + (first + 50) * 128))
        << first;
  }
}

TEST(FusedMoe, ExplicitConstantsNeedNoByteOfTheWorkspaceToSurvive) {
  const Operands o = testing::golden_operands();
  GuardedWorkspace workspace(o.shape, 5, 0xFF);
  ASSERT_TRUE(prepare(o.shape, workspace.data(), workspace.bytes(), 5, kCpu, nullptr).ok());
  std::vector<uint16_t> output(5 * 128);
  Arguments a = o.arguments();
  a.output = output.data();
  a.workspace = workspace.data();
  a.workspace_bytes = workspace.bytes();
  a.situ_beta = o.situ_beta.data();
  a.situ_linear_beta = o.situ_linear_beta.data();
  for (const uint8_t poison : {0xFF, 0x7F, 0x00}) {
    workspace.poison(poison);
    ASSERT_TRUE(run(a).ok());
    EXPECT_EQ(output, testing::golden<uint16_t>("tiny_op_model", "out_bf16"));
  }
}

TEST(FusedMoe, ConvertedIdsAndWeightsGiveTheSameBits) {
  const Operands o = testing::random_operands({128, 64, 8, 4}, 9, 5);
  const auto expected = run_once(o, o.arguments(), 0xFF);
  const std::vector<int64_t> ids(o.topk_ids.begin(), o.topk_ids.end());
  std::vector<float> weights;
  for (const uint16_t weight : o.topk_weights) {  // a little off, still rounding to the same bf16
    weights.push_back(bits_float((uint32_t{weight} << 16) + 0x7FFF));
  }
  Arguments a = o.arguments();
  a.topk_ids = ids.data();
  a.topk_ids_type = IdType::kInt64;
  a.topk_weights = weights.data();
  a.topk_weights_type = WeightType::kFloat32;
  EXPECT_EQ(run_once(o, a, 0xFF), expected);
}

TEST(FusedMoe, EmptySlotsAddNothingWhateverTheirWeight) {
  Operands o = testing::random_operands({128, 64, 8, 4}, 3, 6);
  std::fill(o.topk_ids.begin(), o.topk_ids.end(), 5);
  const auto full = run_once(o, o.arguments(), 0xFF);
  std::fill_n(o.topk_ids.begin() + 4, 4, -1);  // token 1 is empty
  o.topk_ids[5] = INT32_MAX;
  o.topk_weights[4] = 0x7FC0;  // NaN
  const auto output = run_once(o, o.arguments(), 0xFF);
  for (int h = 0; h < 128; ++h) {
    EXPECT_EQ(output[h], full[h]);
    EXPECT_EQ(output[128 + h], 0);
    EXPECT_EQ(output[256 + h], full[256 + h]);
  }
}

TEST(FusedMoe, ZeroTokensNeedNothing) {
  Arguments a;
  EXPECT_TRUE(run(a).ok());
  EXPECT_TRUE(prepare(kKimiK3, nullptr, 0, 0, kCpu, nullptr).ok());
}

struct Refusal {
  const char* name;
  void (*change)(Arguments& a, Operands& o, std::vector<uint16_t>& output);
  const char* message;
};

void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.name; }

class Refuses : public ::testing::TestWithParam<Refusal> {};

TEST_P(Refuses, NamingTheArgumentAndWritingNothing) {
  Operands o = testing::golden_operands();
  GuardedWorkspace workspace(o.shape, 6, 0xFF);
  ASSERT_TRUE(prepare(o.shape, workspace.data(), workspace.bytes(), 5, kCpu, nullptr).ok());
  std::vector<uint16_t> output(6 * 128, 0x7FC0);
  Arguments a = o.arguments();
  a.output = output.data();
  a.workspace = workspace.data();
  a.workspace_bytes = workspace.bytes();
  GetParam().change(a, o, output);
  const Status status = run(a);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find(GetParam().message), std::string::npos) << status.message();
  EXPECT_EQ(output, std::vector<uint16_t>(6 * 128, 0x7FC0));
}

using Output = std::vector<uint16_t>;
INSTANTIATE_TEST_SUITE_P(
    FusedMoe, Refuses,
    ::testing::Values(
        Refusal{"TooManyTokens",
                [](Arguments& a, Operands&, Output&) { a.num_tokens = kMaxTokens + 1; },
                "num_tokens: expected 0 to 16384, got 16385"},
        Refusal{"NegativeTokens", [](Arguments& a, Operands&, Output&) { a.num_tokens = -1; },
                "num_tokens: expected 0 to 16384, got -1"},
        Refusal{"UnpreparedCount", [](Arguments& a, Operands&, Output&) { a.num_tokens = 4; },
                "expected a buffer prepared for 4 tokens"},
        Refusal{"NoWorkspace", [](Arguments& a, Operands&, Output&) { a.workspace = nullptr; },
                "workspace_buffer: expected a prepared buffer"},
        Refusal{"SmallWorkspace", [](Arguments& a, Operands&, Output&) { a.workspace_bytes = 100; },
                "workspace_buffer: expected at least"},
        Refusal{"OtherSize", [](Arguments& a, Operands&, Output&) { --a.workspace_bytes; },
                "prepare"},
        Refusal{"Misaligned",
                [](Arguments& a, Operands&, Output&) {
                  a.workspace = static_cast<char*>(a.workspace) + 8;
                },
                "aligned to 64 bytes"},
        Refusal{"OverwrittenConstants",
                [](Arguments& a, Operands&, Output&) { std::memset(a.workspace, 0xFF, 64); },
                "prepare the buffer again"},
        Refusal{"NegativeStride", [](Arguments& a, Operands&, Output&) { a.input_stride = -128; },
                "input: expected a row stride"},
        Refusal{"NullInput", [](Arguments& a, Operands&, Output&) { a.input = nullptr; },
                "input: expected data"},
        Refusal{"NullWeights", [](Arguments& a, Operands&, Output&) { a.w2_sf = nullptr; },
                "quant_scales[4] (w2_sf): expected data"},
        Refusal{"NullOutput", [](Arguments& a, Operands&, Output&) { a.output = nullptr; },
                "output: expected data"},
        Refusal{"InputInOutput",
                [](Arguments& a, Operands&, Output& output) { a.input = output.data() + 127; },
                "output: expected memory of its own, got memory that overlaps input"},
        Refusal{"ScalesInWorkspace",
                [](Arguments& a, Operands&, Output&) {
                  a.fc1_alpha = static_cast<const float*>(a.workspace);
                },
                "workspace_buffer: expected memory of its own"},
        Refusal{"BadShape", [](Arguments& a, Operands&, Output&) { a.shape.hidden = 96; },
                "shape: expected hidden a multiple of 128"}),
    [](const auto& info) { return info.param.name; });

TEST(FusedMoe, StrideMinusOneMeansContiguousRows) {
  const Operands o = testing::random_operands({128, 64, 8, 4}, 3, 7);
  Arguments a = o.arguments();
  const auto expected = run_once(o, a, 0xFF);
  a.input_stride = -1;
  EXPECT_EQ(run_once(o, a, 0xFF), expected);
}

TEST(FusedMoe, BytesOfAnUnsupportedRequestAreMinusOne) {
  EXPECT_EQ(workspace_bytes(kKimiK3, -1), -1);
  EXPECT_EQ(workspace_bytes(kKimiK3, kMaxTokens + 1), -1);
  EXPECT_EQ(workspace_bytes({100, 64, 8, 4}, 1), -1);
  EXPECT_GT(workspace_bytes(kKimiK3, 0), 0);
}

TEST(Quantize, RefusesNullAndOverlappingMemory) {
  std::vector<uint16_t> memory(64);
  const float q = 1.0f;
  QuantizeArguments a{.input = memory.data(), .rows = 1, .columns = 32, .input_scale = &q};
  EXPECT_NE(quantize_nvfp4(a).message().find("packed: expected data"), std::string::npos);
  a.packed = memory.data() + 24;
  a.sf = memory.data() + 40;
  EXPECT_NE(quantize_nvfp4(a).message().find("overlaps input"), std::string::npos);
  a.packed = memory.data() + 33;
  a.sf = memory.data() + 40;
  EXPECT_NE(quantize_nvfp4(a).message().find("overlaps sf"), std::string::npos);
  a.sf = memory.data() + 48;
  EXPECT_TRUE(quantize_nvfp4(a).ok());
}

TEST(Prepare, RefusesATooSmallBufferAndSaysTheBytes) {
  alignas(128) char buffer[256];
  const Status status = prepare(kKimiK3, buffer, 256, 8, kCpu, nullptr);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find(std::to_string(workspace_bytes(kKimiK3, 8))), std::string::npos);
}

}  // namespace
}  // namespace cake
