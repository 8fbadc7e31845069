#pragma once

#include "cake/status.h"
#include "decode/params.h"
#include "plan.h"

namespace cake {

// FC1, SiTU, requantization and FC2 for few pairs per expert on the current device, sm_90.
Status launch_decode(const decode::Params& params, const Plan& plan, void* stream);

// Loads the kernel; part of preparation on sm_90.
Status load_decode();

}  // namespace cake
