// What the decode kernel reads and writes.
#pragma once

#include <cstdint>

#include "common/work_pool.h"
#include "fc1/params.h"
#include "fc2/params.h"

namespace cake::decode {

struct Params {
  fc1::Params fc1;
  fc2::Params fc2;        // its input is FC1's output
  RangeCounters* ranges;  // of FC1; 0 before the launch
};

}  // namespace cake::decode
