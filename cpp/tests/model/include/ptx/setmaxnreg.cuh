// The model's threads keep their registers: see cpp/kernels/ptx/setmaxnreg.cuh.
#pragma once

#include <cstdint>

namespace cake::ptx {

template <uint32_t kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {}

template <uint32_t kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {}

}  // namespace cake::ptx
