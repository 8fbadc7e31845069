// What the model finds wrong, and how the host learns of it: written to host memory, which outlives
// a kernel that ends in a fault.
#pragma once

#include <cstdint>

namespace cake::model {

enum class Error : int32_t {
  kMatrixDescriptor,
  kInstructionDescriptor,
  kTensorAddress,
  kAllocation,
  kNotFreed,
  kUninitialized,
  kCommitMissing,
  kIssuer,
  kWarp,
  kFenceAfter,
  kFenceBefore,
  kProxyFence,
  kLoadWait,
  kLoadRace,
  kScaleRace,
  kStageRace,
  kBarrier,
  kTensorMap,
  kTimeout,
  kCount,
};

inline constexpr int kErrors = static_cast<int>(Error::kCount);

inline const char* error_text(int error) {
  static constexpr const char* kTexts[kErrors] = {
      "matrix descriptor: not one that the kernels may use",
      "instruction descriptor: not one that the kernels may use",
      "tensor memory address: outside the allocation, not aligned, or with a lane",
      "allocation: against the protocol of alloc, relinquish and dealloc",
      "not freed: columns were still allocated when the kernel ended",
      "uninitialized: tensor memory was read before it was written",
      "commit missing: no commit after the last cp or mma",
      "issuer: a second thread issued cp, mma or commit",
      "warp: different addresses, or lanes of another warp",
      "fence after: no tcgen05.fence::after_thread_sync after a wait",
      "fence before: no tcgen05.fence::before_thread_sync between a load and an arrival",
      "proxy fence: stores of threads read by the tensor core without fence.proxy.async",
      "load wait: words of a tcgen05.ld used or given up without tcgen05.wait::ld",
      "load race: tensor memory was loaded while a matrix instruction may write it",
      "scale race: cp overwrites scales that an earlier mma may still read",
      "stage race: a copy overwrites shared memory that a cp or mma may still read",
      "barrier: named barriers are 1 to 14",
      "tensor map: box not as the instruction needs it",
      "timeout: a barrier was waited for in vain",
  };
  return kTexts[error];
}

// The first occurrence of an error.
struct Occurrence {
  int32_t found;  // written last
  uint32_t block, thread, line;
  uint64_t info;  // the offending descriptor, address or barrier
  char file[72];  // the end of its name
};

// In host memory that the device maps.
struct Report {
  Occurrence errors[kErrors];
  int32_t planted;     // the planted bug was asked for
  int32_t engine_ran;  // a CTA was run by the model
};

}  // namespace cake::model
