#pragma once

#include "cake/status.h"
#include "fc2/params.h"
#include "plan.h"

namespace cake {

// FC2 for one part of the output columns on the current device.
Status launch_fc2(const fc2::Params& params, const Plan& plan, void* stream);

// Loads the kernels of an architecture; part of preparation.
Status load_fc2(Architecture architecture);

}  // namespace cake
