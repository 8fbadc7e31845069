#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>

#include "kernel_launch.h"
#include "ptx/pdl.cuh"
#include "tensor_map.h"
#include "tests/model/harness.h"
#include "tests/model/state.cuh"

namespace cake::model {
namespace {

constexpr int kGuard = 1024;
constexpr int kGuardByte = 0x5A;

void expect_success(cudaError_t code, const char* what) {
  EXPECT_EQ(code, cudaSuccess) << what << ": " << cudaGetErrorString(code);
}

uint32_t byte_at(const CUtensorMap& map, int bit) {
  uint32_t value = 0;
  for (int i = 0; i < 8; ++i) {
    value |= static_cast<uint32_t>(map.opaque[(bit + i) / 64] >> (bit + i) % 64 & 1) << i;
  }
  return value;
}

// The bit at which the driver's maps hold the size of a box less one; `dimension`: 0 bytes, 1 rows.
int find_box_size(const void* memory, int dimension) {
  constexpr uint32_t kSizes[] = {16, 48, 208, 256};
  CUtensorMap maps[std::size(kSizes)]{};
  for (size_t i = 0; i < std::size(kSizes); ++i) {
    const uint32_t bytes = dimension == 0 ? kSizes[i] : 32;
    const uint32_t rows = dimension == 1 ? kSizes[i] : 8;
    EXPECT_TRUE(make_byte_map(memory, 1024, 1024, rows, bytes, &maps[i]).ok());
  }
  for (int bit = 0; bit + 8 <= static_cast<int>(sizeof(CUtensorMap)) * 8; ++bit) {
    bool found = true;
    for (size_t i = 0; i < std::size(kSizes); ++i) {
      found = found && byte_at(maps[i], bit) + 1 == kSizes[i];
    }
    if (found) {
      return bit;
    }
  }
  ADD_FAILURE() << "unknown format of tensor maps";
  return 0;
}

__global__ void deliver(const Delivery* deliveries, int32_t count) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  for (int i = 0; i < 4000; ++i) {
    __nanosleep(500);
  }
  for (int32_t d = 0; d < count; ++d) {
    for (int64_t i = threadIdx.x; i < deliveries[d].bytes; i += blockDim.x) {
      deliveries[d].destination[i] = deliveries[d].source[i];
    }
  }
}

}  // namespace

DeviceMemory::DeviceMemory(int64_t bytes) : bytes_(bytes) {
  expect_success(cudaMalloc(&base_, bytes + 2 * kGuard), "cudaMalloc");
  expect_success(cudaMemset(base_, kGuardByte, bytes + 2 * kGuard), "cudaMemset");
}
DeviceMemory::~DeviceMemory() { cudaFree(base_); }
uint8_t* DeviceMemory::data() const { return base_ + kGuard; }
void DeviceMemory::fill(int byte) const {
  expect_success(cudaMemset(data(), byte, bytes_), "cudaMemset");
}
void DeviceMemory::upload(const void* source, int64_t offset, int64_t bytes) const {
  expect_success(cudaMemcpy(data() + offset, source, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
}
void DeviceMemory::read(void* to, int64_t offset, int64_t bytes) const {
  const auto copy = [](void* destination, const void* source, int64_t size) {
    expect_success(cudaMemcpy(destination, source, size, cudaMemcpyDeviceToHost), "cudaMemcpy");
  };
  for (const uint8_t* guard : {base_, data() + bytes_}) {
    std::array<uint8_t, kGuard> held;
    copy(held.data(), guard, kGuard);
    EXPECT_TRUE(std::all_of(held.begin(), held.end(), [](uint8_t b) { return b == kGuardByte; }))
        << "a guard byte was written";
  }
  copy(to, data() + offset, bytes);
}

namespace {

class Summary : public ::testing::Environment {
 public:
  void add(const std::string& line) { lines_.push_back(line); }
  void TearDown() override {
    for (const std::string& line : lines_) {
      std::printf("%s\n", line.c_str());
    }
  }

 private:
  std::vector<std::string> lines_;
};
// GoogleTest owns it.
auto* const summary = static_cast<Summary*>(::testing::AddGlobalTestEnvironment(new Summary));

}  // namespace

void add_to_summary(const std::string& line) { summary->add(line); }

uint8_t* LateInputs::add_bytes(const void* data, size_t bytes) {
  const auto size = static_cast<int64_t>(bytes);
  memory_.push_back(std::make_unique<DeviceMemory>(size));
  memory_.back()->upload(data);
  const uint8_t* source = memory_.back()->as();
  memory_.push_back(std::make_unique<DeviceMemory>(size));
  deliveries_.push_back({memory_.back()->as(), source, size});
  return deliveries_.back().destination;
}

Status LateInputs::launch() {
  for (const Delivery& delivery : deliveries_) {
    CAKE_RETURN_IF_ERROR(
        cuda_status(cudaMemset(delivery.destination, 0xFF, delivery.bytes), "cudaMemset"));
  }
  list_ = std::make_unique<DeviceMemory>(deliveries_);
  LaunchConfig where;
  where.grid = dim3(1);
  where.block = dim3(256);
  return cake::launch("deliver", where, &deliver, list_->as<const Delivery>(),
                      static_cast<int32_t>(deliveries_.size()));
}

void ModelTest::SetUp() {
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess || properties.major != 9) {
    GTEST_SKIP() << "no GPU of compute capability 9.0";
  }
  num_states_ = 2 * properties.multiProcessorCount;
  expect_success(cudaMalloc(&states_, num_states_ * sizeof(State)), "cudaMalloc");
  expect_success(cudaMemset(states_, 0, num_states_ * sizeof(State)), "cudaMemset");
  expect_success(cudaMalloc(&reported_, (kErrors + 1) * sizeof(int32_t)), "cudaMalloc");
  expect_success(cudaHostAlloc(&report_, sizeof(Report), cudaHostAllocMapped), "cudaHostAlloc");

  box_bytes_bit_ = find_box_size(states_, 0);
  box_rows_bit_ = find_box_size(states_, 1);
}

void ModelTest::TearDown() {
  cudaFree(states_);
  cudaFree(reported_);
  cudaFreeHost(report_);
}

void ModelTest::expect_no_error() {
  for (int i = 0; i < kErrors; ++i) {
    const Occurrence& first = report_->errors[i];
    if (first.found != 0) {
      ADD_FAILURE() << "model: " << error_text(i) << "\n  first: " << first.file << ":"
                    << first.line << ", block " << first.block << ", thread " << first.thread
                    << std::hex << ", info 0x" << first.info;
    }
  }
}

void ModelTest::run(const std::function<Status()>& launch, const std::function<void()>& verify) {
  const char* const bug = std::getenv("CAKE_PLANTED_BUG");
  const auto setting = [&](Mode mode, uint32_t seed) {
    static constexpr const char* kModes[] = {"eager", "late", "random"};
    SCOPED_TRACE(std::string("mode ") + kModes[static_cast<int>(mode)] + ", seed " +
                 std::to_string(seed));
    std::memset(report_, 0, sizeof(*report_));
    expect_success(cudaMemset(states_, 0, num_states_ * sizeof(State)), "cudaMemset");
    expect_success(cudaMemset(reported_, 0, (kErrors + 1) * sizeof(int32_t)), "cudaMemset");
    const Control control{.states = static_cast<State*>(states_),
                          .num_states = num_states_,
                          .report = report_,
                          .reported = reported_,
                          .mode = mode,
                          .seed = seed,
                          .bug = bug == nullptr ? 0 : std::atoi(bug),
                          .box_bytes_bit = box_bytes_bit_,
                          .box_rows_bit = box_rows_bit_};
    for (const ControlSymbol* s = ControlSymbol::first(); s != nullptr; s = s->next) {
      expect_success(cudaMemcpyToSymbol(s->symbol, &control, sizeof(control)), "control");
    }
    const Status status = launch();
    EXPECT_TRUE(status.ok()) << status.message();
    const cudaError_t ended = cudaDeviceSynchronize();
    if (report_->planted != 0) {
      std::printf("planted\n");
    }
    EXPECT_NE(report_->engine_ran, 0) << "no kernel was run by the model";
    expect_no_error();
    ASSERT_EQ(ended, cudaSuccess) << cudaGetErrorString(ended);
    verify();
  };
  setting(Mode::kEager, 0);
  if (!HasFailure()) {
    setting(Mode::kLate, 0);
  }
  for (uint32_t seed = 1; seed <= kRandomSeeds && !HasFailure(); ++seed) {
    setting(Mode::kRandom, seed);
  }
}

}  // namespace cake::model
