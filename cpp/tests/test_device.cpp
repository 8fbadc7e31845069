// On a GPU: the input quantizer against the CPU path, and which cubin runs. Skipped without one.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <random>

#include "cake/fused_moe.h"
#include "npy.h"

namespace cake {
namespace {

constexpr Device kGpu{DeviceType::kCuda, 0};

class OnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
      GTEST_SKIP() << "no CUDA GPU on this machine";
    }
    cudaDeviceProp properties{};
    ASSERT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
    capability = 10 * properties.major + properties.minor;
    if (capability != 90 && capability != 100 && capability != 103) {
      GTEST_SKIP() << "compute capability " << capability << " has no code in this build";
    }
  }
  int capability = 0;
};

// Device memory with guard bytes around `bytes` usable ones.
class DeviceBuffer {
 public:
  DeviceBuffer(int64_t bytes, int64_t offset = 0) : bytes_(bytes), start_(256 + offset) {
    EXPECT_EQ(cudaMalloc(&base_, bytes + 1024), cudaSuccess);
    EXPECT_EQ(cudaMemset(base_, 0x5A, bytes + 1024), cudaSuccess);
  }
  ~DeviceBuffer() { cudaFree(base_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void* data() { return base_ + start_; }
  void upload(const void* source) {
    EXPECT_EQ(cudaMemcpy(data(), source, bytes_, cudaMemcpyHostToDevice), cudaSuccess);
  }
  // The usable bytes; fails the test if a guard byte changed.
  std::vector<uint8_t> download() {
    std::vector<uint8_t> all(bytes_ + 1024);
    EXPECT_EQ(cudaMemcpy(all.data(), base_, all.size(), cudaMemcpyDeviceToHost), cudaSuccess);
    for (int64_t i = 0; i < static_cast<int64_t>(all.size()); ++i) {
      if ((i < start_ || i >= start_ + bytes_) && all[i] != 0x5A) {
        ADD_FAILURE() << "guard byte " << i - start_ << " was written";
        break;
      }
    }
    return {all.begin() + start_, all.begin() + start_ + bytes_};
  }

 private:
  char* base_ = nullptr;
  int64_t bytes_;
  int64_t start_;
};

// Quantizes `rows` on the CPU and on the GPU and expects the same bytes.
void expect_same_quantization(const std::vector<uint16_t>& input, int64_t rows, int64_t columns,
                              int64_t stride, float q, int64_t byte_offset) {
  std::vector<uint8_t> packed(rows * columns / 2), sf(rows * columns / 16);
  QuantizeArguments a{.input = input.data(),
                      .rows = rows,
                      .columns = columns,
                      .input_stride = stride,
                      .input_scale = &q,
                      .packed = packed.data(),
                      .sf = sf.data()};
  ASSERT_TRUE(quantize_nvfp4(a).ok());

  DeviceBuffer gpu_input(static_cast<int64_t>(input.size()) * 2, byte_offset), gpu_q(4),
      gpu_packed(packed.size()), gpu_sf(sf.size());
  gpu_input.upload(input.data());
  gpu_q.upload(&q);
  a.input = gpu_input.data();
  a.input_scale = static_cast<const float*>(gpu_q.data());
  a.packed = gpu_packed.data();
  a.sf = gpu_sf.data();
  a.device = kGpu;
  const Status status = quantize_nvfp4(a);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(gpu_sf.download(), sf) << "q = " << q;
  EXPECT_EQ(gpu_packed.download(), packed) << "q = " << q;
}

TEST_F(OnGpu, QuantizerEqualsTheCpuPathOnRandomRows) {
  std::mt19937 rng(7);
  std::normal_distribution<float> normal;
  for (const int64_t rows : {1, 7, 300}) {
    std::vector<uint16_t> input(rows * 3584);
    for (auto& value : input) {
      const float x = normal(rng) * std::exp2(2 * normal(rng));
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      value = static_cast<uint16_t>(bits >> 16);
    }
    for (const float q : {1.0f, 613.7f, 0.01f, 3e4f}) {
      expect_same_quantization(input, rows, 3584, 3584, q, 0);
    }
  }
}

// Every bit pattern of bf16 in random company: NaN, Inf, subnormals, both zeros.
TEST_F(OnGpu, QuantizerEqualsTheCpuPathOnAllBf16Patterns) {
  std::mt19937 rng(8);
  std::vector<uint16_t> input(4 * 65536);
  for (size_t i = 0; i < input.size(); ++i) {
    input[i] = static_cast<uint16_t>(i);
  }
  std::shuffle(input.begin(), input.begin() + 65536, rng);
  for (size_t i = 65536; i < 2 * 65536; ++i) {  // blocks of similar magnitude: exponent by block
    input[i] = static_cast<uint16_t>((rng() & 0x80FF) | (i / 16 % 256) << 7);
  }
  for (const float q : {1.0f, 500.0f, 1e-30f, 1e30f}) {
    expect_same_quantization(input, 256, 1024, 1024, q, 0);
  }
}

TEST_F(OnGpu, QuantizerEqualsTheCpuPathOnGoldenEdgeCases) {
  const auto input = testing::golden<uint16_t>("quant_edge", "x_bf16_bits");
  for (const char* key : {"gs_0", "gs_1", "gs_2", "gs_3"}) {
    expect_same_quantization(input, 16, 64, 64, testing::golden<float>("quant_edge", key)[0], 0);
  }
}

TEST_F(OnGpu, QuantizerTakesStridedAndUnalignedRows) {
  std::mt19937 rng(9);
  std::vector<uint16_t> input(20 * 3601);
  for (auto& value : input) {
    value = static_cast<uint16_t>(0x3F00 + rng() % 512);
  }
  expect_same_quantization(input, 20, 3584, 3601, 1.0f, 0);  // odd stride
  expect_same_quantization(input, 20, 3584, 3600, 1.0f, 2);  // odd address
  expect_same_quantization(input, 20, 3584, 3600, 1.0f, 0);
}

TEST_F(OnGpu, SelftestRunsTheCubinOfThisGpu) {
  DeviceBuffer out(5000 * 4);
  ASSERT_TRUE(run_selftest(static_cast<int32_t*>(out.data()), 5000, kGpu, nullptr).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const auto bytes = out.download();
  for (int i = 0; i < 5000; ++i) {
    int32_t value;
    std::memcpy(&value, bytes.data() + 4 * i, 4);
    ASSERT_EQ(value, 1000 * capability + i % 1000);
  }
}

}  // namespace
}  // namespace cake
