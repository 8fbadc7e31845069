// Errors that the tests of the Blackwell kernels plant to see that the model catches them.
#pragma once

#include <cstdint>

namespace cake {

enum class PlantedBug : int32_t {
  kNone,
  kMissingFullWait,     // matrix instructions do not wait for a stage's copies
  kMissingCommitWait,   // the epilogue does not wait for the accumulator's commit
  kStageReuse,          // a producer does not wait until a stage is read
  kScaleReuse,          // all stages copy their scales to the same columns
  kAccumulatorReuse,    // matrix instructions do not wait for the epilogue's loads
  kWrongSwizzle,        // an operand's descriptor names no swizzle
  kWrongScaleColumn,    // a scale address is one instruction too far
  kWrongN,              // the instruction descriptor's N is 8 too small
  kMissingProxyFence,   // scales stored by threads, no fence.proxy.async
  kMissingFenceAfter,   // no tcgen05.fence::after_thread_sync after a wait
  kMissingFenceBefore,  // no tcgen05.fence::before_thread_sync before an arrival
  kMissingLoadWait,     // no tcgen05.wait::ld
  kEarlyDependentRead,  // no griddepcontrol.wait before what another kernel wrote is read
  kMissingDealloc,      // columns are not given back
  kTail,                // the last pair of a tile is left out
  kCount,
};

}  // namespace cake
