// Dynamic distribution of independent items over the workers of a CpuExecutor.
#pragma once

#include <atomic>
#include <cstdint>

#include "cake/fused_moe.h"

namespace cake::cpu {

// One thread per core, started for each parallel region. For callers without a thread pool.
const CpuExecutor& default_executor();

// Calls function(item) once for every item in [0, count). Items must be independent; which worker
// takes which item depends on timing, so a result may not depend on it.
template <class Function>
void for_each_item(const CpuExecutor& executor, int64_t count, const Function& function) {
  struct Context {
    const Function& function;
    int64_t count;
    std::atomic<int64_t> next{0};
  } context{function, count};
  const int32_t workers =
      count < executor.num_workers ? static_cast<int32_t>(count) : executor.num_workers;
  if (workers <= 1) {
    for (int64_t item = 0; item < count; ++item) {
      function(item);
    }
    return;
  }
  executor.run(
      workers,
      [](void* opaque, int32_t) {
        auto& shared = *static_cast<Context*>(opaque);
        for (int64_t item;
             (item = shared.next.fetch_add(1, std::memory_order_relaxed)) < shared.count;) {
          shared.function(item);
        }
      },
      &context);
}

}  // namespace cake::cpu
