#pragma once

#include "cake/status.h"
#include "common/slots.h"

namespace cake {

struct FinalizeArguments {
  Slots slots;
  int32_t num_tokens;
  const void* rows;  // bf16 [P, columns]
  int32_t columns;   // a multiple of 128
  void* output;      // bf16, first of `columns` columns of a [T, 3584] matrix
  void* stream;
};

// Weighted sum over the slots for one part of the output columns, on the current device.
Status launch_finalize(const FinalizeArguments& arguments);

// Loads the kernel; part of preparation.
Status load_finalize();

}  // namespace cake
