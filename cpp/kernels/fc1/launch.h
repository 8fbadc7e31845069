#pragma once

#include "cake/status.h"
#include "fc1/params.h"

namespace cake {

// FC1, SiTU and requantization on the current device, `num_ctas` persistent CTAs.
Status launch_fc1(const fc1::Params& params, int32_t num_ctas, void* stream);

// Loads the kernels; part of preparation.
Status load_fc1();

}  // namespace cake
