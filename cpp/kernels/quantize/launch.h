#pragma once

#include "cake/fused_moe.h"

namespace cake::quantize {

// Input quantizer on the current CUDA device; `arguments` have been validated and are not empty.
// Any alignment of the input works; rows whose groups are 16-byte aligned take wide loads.
Status launch_quantize(const QuantizeArguments& arguments);

}  // namespace cake::quantize
