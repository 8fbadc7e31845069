// Programmatic dependent launch.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
#pragma once

namespace cake::ptx {

// Blocks until the grid before this one has finished and its writes are visible.
__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the dependent grid start once all CTAs of this one have called it or have ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace cake::ptx
