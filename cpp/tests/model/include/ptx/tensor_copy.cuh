// The model's tensor copies: see cpp/kernels/ptx/tensor_copy.cuh. Their destination holds NaNs
// until they land; sm_90a has no gather4, four copies of one row do the same.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "tests/model/native.cuh"
#include "tests/model/queue.cuh"

namespace cake::model {

struct Box {
  uint32_t bytes, rows;
};

__device__ __forceinline__ Box box_of(const CUtensorMap& map) {
  const auto byte_at = [&map](int32_t bit) {
    uint32_t value = 0;
    for (int32_t i = 0; i < 8; ++i) {
      const int32_t at = bit + i;
      value |= (static_cast<uint32_t>(map.opaque[at / 64] >> at % 64) & 1u) << i;
    }
    return value;
  };
  return {byte_at(control.box_bytes_bit) + 1, byte_at(control.box_rows_bit) + 1};
}

}  // namespace cake::model

namespace cake::ptx {

using native_ptx::prefetch_tensormap;

__device__ __forceinline__ void cp_async_bulk_tensor_2d(
    uint32_t destination, const CUtensorMap& map, int32_t x, int32_t y, uint32_t barrier,
    model::Location where = model::Location::current()) {
  const model::Box box = model::box_of(map);
  model::poison_copy(destination, box.bytes * box.rows, where);
  native_ptx::fence_proxy_async();
  native_ptx::cp_async_bulk_tensor_2d(destination, map, x, y, barrier);
}

__device__ __forceinline__ void cp_async_bulk_tensor_2d(
    uint32_t destination, const CUtensorMap& map, int32_t x, int32_t y, uint32_t barrier,
    uint64_t policy, model::Location where = model::Location::current()) {
  const model::Box box = model::box_of(map);
  model::poison_copy(destination, box.bytes * box.rows, where);
  native_ptx::fence_proxy_async();
  native_ptx::cp_async_bulk_tensor_2d(destination, map, x, y, barrier, policy);
}

__device__ __forceinline__ void cp_async_bulk_tensor_2d_gather4(
    uint32_t destination, const CUtensorMap& map, int32_t x, int32_t y0, int32_t y1, int32_t y2,
    int32_t y3, uint32_t barrier, model::Location where = model::Location::current()) {
  const model::Box box = model::box_of(map);
  model::check(box.rows == 1, model::Error::kTensorMap, where, box.rows);
  model::poison_copy(destination, 4 * box.bytes, where);
  native_ptx::fence_proxy_async();
  const int32_t rows[4] = {y0, y1, y2, y3};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    native_ptx::cp_async_bulk_tensor_2d(destination + i * box.bytes, map, x, rows[i], barrier);
  }
}

}  // namespace cake::ptx
