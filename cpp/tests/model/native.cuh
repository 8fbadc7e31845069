// The instructions that the model itself uses, from the files of cpp/kernels/ptx that it replaces.
#pragma once

#include <cuda.h>

#include <cstdint>

#define ptx native_ptx
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/bulk_copy.cuh"
#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/tensor_copy.cuh"
#undef ptx

namespace cake::model {
namespace native = native_ptx;
}
