// What a Blackwell kernel says to the software model that runs it on sm_90a for tests. Here, in the
// product: nothing. The tests' model (cpp/tests/model/include) has a file of this name, and of the
// names in ptx/, which its build finds first: one kernel source serves both.
//
//   __global__ void __launch_bounds__(kThreads + model::kEngineThreads, 1) cake_kernel_sm100(...) {
//     const model::Engine engine(kThreads);
//     if (engine.ran()) {
//       return;
//     }
//     ...
//
// The host launches kThreads + model::kEngineThreads threads. In such a kernel barriers count their
// threads (ptx::bar_sync, ids 1 to 14), threads store with ptx::st_shared what the tensor core is
// to read, and planted() is asked where leaving something out must make a test fail:
//
//     if (!model::planted(PlantedBug::kMissingFullWait)) {
//       ptx::mbarrier_wait(...);
//     }
#pragma once

#include <cstdint>

#include "common/planted_bug.h"

// Whether this pass compiles the bodies of Blackwell kernels.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 1000
#define CAKE_HAS_TCGEN05 1
#else
#define CAKE_HAS_TCGEN05 0
#endif

namespace cake::model {

inline constexpr int32_t kMaxSharedBytes = 231424;  // dynamic, of a CTA
inline constexpr int32_t kEngineThreads = 0;        // after the kernel's own

class Engine {
 public:
  __device__ __forceinline__ explicit Engine(int32_t /*kernel_threads*/) {}
  __device__ __forceinline__ bool ran() const { return false; }  // this thread was the engine's
};

__device__ __forceinline__ constexpr bool planted(PlantedBug) { return false; }

}  // namespace cake::model
