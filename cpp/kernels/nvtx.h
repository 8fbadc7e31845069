// Named ranges on the host, which profilers show above the kernels: a call and its stages (NVTX 3,
// domain "cake").
//
// Where no tool listens, and with CAKE_DISABLE_NVTX=1 (read once, by the first range), a range is
// two calls that test a pointer.
#pragma once

#include <cstdint>

namespace cake::nvtx {

// A range from construction to destruction, on this thread.
class Range {
 public:
  explicit Range(const char* name);
  Range(const char* name, int64_t num_tokens);  // shown as "name T=num_tokens"
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

}  // namespace cake::nvtx
