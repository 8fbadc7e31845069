#pragma once

#include "cake/status.h"
#include "fc1/params.h"
#include "plan.h"

namespace cake {

// FC1, SiTU and requantization on the current device.
Status launch_fc1(const fc1::Params& params, const Plan& plan, void* stream);

// Loads the kernels of an architecture; part of preparation.
Status load_fc1(Architecture architecture);

}  // namespace cake
