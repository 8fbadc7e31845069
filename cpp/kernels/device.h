// What the host code needs from a GPU. Without CUDA in the build each function reports that.
#pragma once

#include <cstdint>

#include "cake/fused_moe.h"

namespace cake::device {

// Makes `index` the current CUDA device until destruction, then restores the former one.
class CurrentDevice {
 public:
  explicit CurrentDevice(int32_t index);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  const Status& status() const { return status_; }

 private:
  Status status_;
  int32_t former_ = -1;  // -1: nothing to restore
};

// Compute capability of `index`.
Status compute_capability(int32_t index, int32_t* major, int32_t* minor);

Status multiprocessor_count(int32_t index, int32_t* count);

Status quantize(const QuantizeArguments& arguments);
Status fused_moe(const Arguments& arguments);

// Writes the default SiTU constants of a workspace and loads every kernel that a call with
// `num_tokens` tokens launches. kRuntimeError while `stream` records a graph.
Status prepare(void* workspace, int32_t num_tokens, void* stream);

Status selftest(int32_t* out, int64_t count, void* stream);
Status read_stream(const void* data, int64_t bytes, int32_t index, void* stream);

}  // namespace cake::device
