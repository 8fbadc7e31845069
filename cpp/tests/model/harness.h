// Runs kernels by the model: owns its memory, launches in every mode, and fails a test for whatever
// the model reports.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cake/status.h"
#include "tests/model/errors.h"

namespace cake::model {

// Device memory that begins and ends with guard bytes; freed with the object.
class DeviceMemory {
 public:
  explicit DeviceMemory(int64_t bytes);
  template <class T>
  explicit DeviceMemory(const std::vector<T>& values)
      : DeviceMemory(static_cast<int64_t>(values.size() * sizeof(T))) {
    upload(values.data());
  }
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  template <class T = uint8_t>
  T* as() const {
    return reinterpret_cast<T*>(data());
  }
  int64_t bytes() const { return bytes_; }
  void fill(int byte) const;
  void upload(const void* source) const { upload(source, 0, bytes_); }
  void upload(const void* source, int64_t offset, int64_t bytes) const;
  // Fails the test if a guard byte has changed.
  template <class T>
  std::vector<T> download() const {
    return download<T>(0, bytes_ / static_cast<int64_t>(sizeof(T)));
  }
  // The same for `count` values from byte `offset` on.
  template <class T>
  std::vector<T> download(int64_t offset, int64_t count) const {
    std::vector<T> values(count);
    read(values.data(), offset, count * static_cast<int64_t>(sizeof(T)));
    return values;
  }

 private:
  uint8_t* data() const;
  void read(void* to, int64_t offset, int64_t bytes) const;
  int64_t bytes_;
  uint8_t* base_ = nullptr;
};

// A kernel that lets its dependents start at once, takes its time, and only then writes what they
// read: source to destination for each delivery. Until then the destinations hold 0xFF.
struct Delivery {
  uint8_t* destination;
  const uint8_t* source;
  int64_t bytes;
};
class LateInputs {
 public:
  // The destination that a kernel is to read after its griddepcontrol.wait.
  template <class T>
  T* add(const std::vector<T>& values) {
    return reinterpret_cast<T*>(add_bytes(values.data(), values.size() * sizeof(T)));
  }
  Status launch();

 private:
  uint8_t* add_bytes(const void* data, size_t bytes);
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  std::vector<Delivery> deliveries_;
  std::unique_ptr<DeviceMemory> list_;
};

// Markdown that the program prints at its end.
void add_to_summary(const std::string& line);

inline constexpr int kRandomSeeds = 6;

// Tests on an sm_90 GPU; skipped without one.
class ModelTest : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  // Eager, late, and random with several seeds: launches, waits, fails for what the model found,
  // then verifies the results. Ends with the first setting that fails.
  void run(const std::function<Status()>& launch, const std::function<void()>& verify);

 private:
  void expect_no_error();

  void* states_ = nullptr;
  int num_states_ = 0;
  Report* report_ = nullptr;
  int32_t* reported_ = nullptr;
  int box_bytes_bit_ = 0, box_rows_bit_ = 0;
};

}  // namespace cake::model
