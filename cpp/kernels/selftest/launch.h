#pragma once

#include <cstdint>

#include "cake/status.h"

namespace cake::selftest {

// out: int32 [count] on the current CUDA device, count > 0.
Status launch_selftest(int32_t* out, int64_t count, void* stream);

}  // namespace cake::selftest
