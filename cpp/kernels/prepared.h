// Which workspaces are prepared, for which token counts. Host state only: a call reads nothing on
// the device to decide. Thread-safe.
#pragma once

#include <cstdint>

#include "cake/fused_moe.h"

namespace cake::prepared {

void add(const Shape& shape, const void* workspace, int64_t bytes, int32_t num_tokens,
         Device device);
bool contains(const Shape& shape, const void* workspace, int64_t bytes, int32_t num_tokens,
              Device device);
void remove(const void* workspace, Device device);

}  // namespace cake::prepared
