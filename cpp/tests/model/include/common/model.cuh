// The hooks of cpp/kernels/common/model.cuh in the build that runs Blackwell kernels by the model.
#pragma once

#include <cstdint>

#include "common/planted_bug.h"
#include "tests/model/engine.cuh"

#define CAKE_HAS_TCGEN05 1

namespace cake::model {

inline constexpr int32_t kMaxSharedBytes = 231424;  // dynamic, of a CTA
[[maybe_unused]] static const ControlSymbol registered(&control);

class Engine {
 public:
  __device__ __forceinline__ explicit Engine(int32_t kernel_threads)
      : ran_(static_cast<int32_t>(threadIdx.x) >= kernel_threads) {
    const int32_t thread = static_cast<int32_t>(threadIdx.x) - kernel_threads;
    if (ran_) {
      take_state(thread);
    }
    native::bar_sync(kStartBarrier, kernel_threads + kEngineThreads);
    if (ran_) {
      EngineWarp(thread / 32, thread % 32).run();
      give_state_back(thread);
    }
  }

  // A thread of the kernel ends.
  __device__ __forceinline__ ~Engine() {
    if (!ran_) {
      __threadfence_block();
      atomicAdd(&state().exited, 1u);
    }
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  __device__ __forceinline__ bool ran() const { return ran_; }

 private:
  bool ran_;
};

// The test chooses at run time which bug is planted.
__device__ __forceinline__ bool planted(PlantedBug bug) {
  const bool chosen = control.bug == static_cast<int32_t>(bug);
  if (chosen && atomicExch(&control.reported[kErrors], 1) == 0) {
    control.report->planted = 1;
  }
  return chosen;
}

}  // namespace cake::model
