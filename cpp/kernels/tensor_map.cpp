#include "tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "kernel_launch.h"

namespace cake {
namespace {

// The driver's encoder; no driver library is linked.
struct Encoder {
  PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  Status status;

  Encoder() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    status = cuda_status(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                          12000, cudaEnableDefault, &found),
                         "cuTensorMapEncodeTiled");
    if (status.ok() && (function == nullptr || found != cudaDriverEntryPointSuccess)) {
      status = error(StatusCode::kRuntimeError,
                     "cuTensorMapEncodeTiled: the driver does not have it; expected a driver for "
                     "CUDA 12.0 or newer");
    }
    encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }
};

Status encode_byte_map(const void* base, uint64_t rows, uint64_t row_bytes, uint32_t box_rows,
                       uint32_t box_bytes, CUtensorMapSwizzle swizzle, CUtensorMap* map) {
  static const Encoder encoder;
  CAKE_RETURN_IF_ERROR(encoder.status);
  const cuuint64_t sizes[2] = {row_bytes, rows};
  const cuuint64_t strides[1] = {row_bytes};
  const cuuint32_t box[2] = {box_bytes, box_rows};
  const cuuint32_t element_strides[2] = {1, 1};
  const CUresult result =
      encoder.encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(base), sizes, strides,
                     box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return error(StatusCode::kRuntimeError, "cuTensorMapEncodeTiled: error ",
                 static_cast<int>(result));
  }
  return {};
}

}  // namespace

Status make_byte_map(const void* base, uint64_t rows, uint64_t row_bytes, uint32_t box_rows,
                     uint32_t box_bytes, CUtensorMap* map) {
  return encode_byte_map(base, rows, row_bytes, box_rows, box_bytes, CU_TENSOR_MAP_SWIZZLE_NONE,
                         map);
}

Status make_swizzled_byte_map(const void* base, uint64_t rows, uint64_t row_bytes,
                              uint32_t box_rows, CUtensorMap* map) {
  return encode_byte_map(base, rows, row_bytes, box_rows, 128, CU_TENSOR_MAP_SWIZZLE_128B, map);
}

}  // namespace cake
