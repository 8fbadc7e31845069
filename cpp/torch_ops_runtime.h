// torch's threads for the CPU path and torch's current CUDA stream.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include "torch_ops_checks.h"

namespace cake::torch_ops {

inline void run_on_torch_threads(int32_t num_workers, void (*body)(void*, int32_t), void* context) {
  struct Job {
    void (*body)(void*, int32_t);
    void* context;
  } job{body, context};
  const auto range = [](int64_t begin, int64_t end, void* opaque) {
    const auto& shared = *static_cast<Job*>(opaque);
    for (int64_t worker = begin; worker < end; ++worker) {
      shared.body(shared.context, static_cast<int32_t>(worker));
    }
  };
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, num_workers, 1, range, &job));
}

inline cake::CpuExecutor torch_executor() {
  uint32_t threads = 1;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  return {static_cast<int32_t>(threads), &run_on_torch_threads};
}

// The raw CUDA stream that torch has made current on a device. Both functions are looked up at run
// time, because CPU-only torch has neither and torch < 2.13 not the second.
class StreamLookup {
 public:
  StreamLookup()
      : current_cuda_(reinterpret_cast<CurrentCuda>(
            find("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream"))),
        native_handle_(
            reinterpret_cast<NativeHandle>(find("libtorch_cpu.so", "torch_stream_native_handle"))) {
  }

  void* current(int32_t device) const {
    void* stream = nullptr;
    if (current_cuda_ != nullptr) {
      TORCH_ERROR_CODE_CHECK(current_cuda_(device, &stream));
    } else if (native_handle_ != nullptr) {
      StreamHandle handle = nullptr;
      TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_stream(device, &handle));
      const AOTITorchError failed = native_handle_(handle, &stream);
      aoti_torch_delete_stream(handle);
      TORCH_ERROR_CODE_CHECK(failed);
    } else {
      raise("Unsupported",
            "device: this torch has no way to tell its current CUDA stream; "
            "install a CUDA build of torch 2.10 or newer");
    }
    return stream;
  }

 private:
  using CurrentCuda = AOTITorchError (*)(int32_t, void**);
  using NativeHandle = AOTITorchError (*)(StreamHandle, void**);

  static void* find(const char* library, const char* symbol) {
    if (void* found = dlsym(RTLD_DEFAULT, symbol)) {
      return found;
    }
    void* loaded = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    return loaded != nullptr ? dlsym(loaded, symbol) : nullptr;
  }

  CurrentCuda current_cuda_;
  NativeHandle native_handle_;
};

inline void* current_stream(cake::Device device) {
  if (device.type == cake::DeviceType::kCpu) {
    return nullptr;
  }
  static const StreamLookup lookup;
  return lookup.current(device.index);
}

}  // namespace cake::torch_ops
