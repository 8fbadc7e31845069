// Reads memory as fast as the GPU can, and drops it: the ceiling that `cake bench` compares with.
// One thread per SM keeps a ring of bulk copies in flight.
#pragma once

#include <cstdint>

#include "common/pipeline.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/pdl.cuh"

namespace cake::stream {

inline constexpr int kStages = 12;
inline constexpr int kChunkBytes = 16384;

struct Storage {
  uint8_t chunks[kStages][kChunkBytes];
  uint64_t full[kStages];
};

__global__ void __launch_bounds__(32, 1)
    cake_read_stream(const uint8_t* __restrict__ data, int64_t num_chunks) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t stream_storage[];
  Storage& shared = *reinterpret_cast<Storage*>(stream_storage);
  ptx::griddepcontrol_wait();
  if (threadIdx.x != 0) {
    return;
  }
  for (int s = 0; s < kStages; ++s) {
    ptx::mbarrier_init(ptx::shared_address(&shared.full[s]), 1);
  }
  ptx::fence_mbarrier_init();
  const uint64_t policy = ptx::createpolicy_evict_first();
  RingPosition<kStages> ahead;
  RingPosition<kStages> behind;
  int32_t in_flight = 0;
  for (int64_t chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    if (in_flight == kStages) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.full[behind.stage]), behind.parity);
      behind.advance();
      --in_flight;
    }
    const uint32_t full = ptx::shared_address(&shared.full[ahead.stage]);
    ptx::mbarrier_arrive_expect_tx(full, kChunkBytes);
    ptx::cp_async_bulk(ptx::shared_address(shared.chunks[ahead.stage]), data + chunk * kChunkBytes,
                       kChunkBytes, full, policy);
    ahead.advance();
    ++in_flight;
  }
  for (; in_flight > 0; --in_flight, behind.advance()) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[behind.stage]), behind.parity);
  }
#endif
}

}  // namespace cake::stream
