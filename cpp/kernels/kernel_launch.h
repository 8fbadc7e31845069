// The one way a kernel is launched: cudaLaunchKernelEx with programmatic dependent launch.
//
// In every CTA of a kernel launched here at least one thread calls ptx::griddepcontrol_wait(), so
// that the end of a grid means the end of all before it. Before its wait a kernel reads only what
// the grid before its predecessor, or an earlier one, wrote; a predecessor that is read past in
// this way (FC1) releases its dependents after its own wait. Such data is read past L1
// (common/tile.cuh), which may hold what was there before. FC2 also claims work before its wait,
// from a counter that routing has set: this too rests on FC1 releasing FC2 after its own wait, and
// on every finalize waiting. The decode kernel stands in FC1's place: it waits, then releases.
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
  uint32_t cluster = 1;  // CTAs
  size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;
};

// Loads a kernel on the current device, so that nothing is loaded during a capture, and allows it
// `shared_bytes` of dynamic shared memory. `registers`: of a thread at launch, which a kernel moves
// between its warpgroups; with fewer they would wait for ever.
template <class... Parameters>
Status load_kernel(const char* name, void (*kernel)(Parameters...), size_t shared_bytes = 0,
                   int registers = 0) {
  cudaFuncAttributes attributes{};
  CAKE_RETURN_IF_ERROR(cuda_status(cudaFuncGetAttributes(&attributes, kernel), name));
  if (attributes.numRegs < registers) {
    return error(StatusCode::kRuntimeError, name, ": expected ", registers,
                 " registers a thread, got ", attributes.numRegs,
                 " from the compiler that built this library; build it with nvcc 13.0");
  }
  return cuda_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(shared_bytes)),
                     name);
}

template <class... Parameters, class... Arguments>
Status launch(const char* name, const LaunchConfig& where, void (*kernel)(Parameters...),
              const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {where.cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = where.grid;
  config.blockDim = where.block;
  config.dynamicSmemBytes = where.shared_bytes;
  config.stream = where.stream;
  config.attrs = attributes;
  config.numAttrs = where.cluster > 1 ? 2 : 1;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name);
}

}  // namespace cake
