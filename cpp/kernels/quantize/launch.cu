#include "kernel_launch.h"
#include "quantize/kernel.cuh"
#include "quantize/launch.h"

namespace cake::quantize {

Status launch_quantize(const QuantizeArguments& a) {
  Params params{};
  params.input = static_cast<const uint16_t*>(a.input);
  params.input_scale = a.input_scale;
  params.packed = static_cast<uint2*>(a.packed);
  params.sf = static_cast<uint8_t*>(a.sf);
  params.input_stride = a.input_stride;
  params.groups = static_cast<int32_t>(a.columns / kGroupSize);
  params.count = a.rows * params.groups;
  if (reinterpret_cast<uintptr_t>(a.packed) % sizeof(uint2) != 0) {
    return invalid_argument("packed: expected an address aligned to 8 bytes, got ", a.packed);
  }
  const int64_t blocks = (params.count + kThreads - 1) / kThreads;
  if (blocks > INT32_MAX) {
    return invalid_argument("input: expected at most ", int64_t{INT32_MAX} * kThreads * kGroupSize,
                            " elements, got ", a.rows * a.columns);
  }
  LaunchConfig where;
  where.grid = dim3(static_cast<unsigned>(blocks));
  where.block = dim3(kThreads);
  where.stream = static_cast<cudaStream_t>(a.stream);
  return launch(
      "cake_quantize", where,
      rows_are_aligned(a.input, a.input_stride) ? &cake_quantize<true> : &cake_quantize<false>,
      params);
}

}  // namespace cake::quantize
