#pragma once

#include <cstdint>

#include "cake/status.h"

namespace cake {

// Sets `count` > 0 floats to `value` on the current device.
Status launch_fill(float* destination, int32_t count, float value, void* stream);

}  // namespace cake
