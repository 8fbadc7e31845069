#pragma once

#include <cstdint>

#include "cake/status.h"

namespace cake::stream {

// Reads `bytes` of device memory, whole chunks of 16384 of them, on the current CUDA device.
Status launch_read_stream(const void* data, int64_t bytes, int32_t num_sms, void* stream);

}  // namespace cake::stream
