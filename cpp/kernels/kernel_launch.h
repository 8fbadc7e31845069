// The one way a kernel is launched: cudaLaunchKernelEx with programmatic dependent launch.
// A kernel launched here calls ptx::griddepcontrol_wait() before it reads what others wrote.
#pragma once

#include <cuda_runtime.h>

#include "message.h"

namespace cake {

inline Status cuda_status(cudaError_t code, const char* what) {
  if (code == cudaSuccess) {
    return {};
  }
  return error(StatusCode::kRuntimeError, what, ": ", cudaGetErrorName(code), ": ",
               cudaGetErrorString(code));
}

struct LaunchConfig {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;
};

template <class... Parameters, class... Arguments>
Status launch(const char* name, const LaunchConfig& where, void (*kernel)(Parameters...),
              const Arguments&... arguments) {
  cudaLaunchAttribute dependent{};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = where.grid;
  config.blockDim = where.block;
  config.dynamicSmemBytes = where.shared_bytes;
  config.stream = where.stream;
  config.attrs = &dependent;
  config.numAttrs = 1;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name);
}

}  // namespace cake
