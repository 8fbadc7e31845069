// The routing that the caller gives: an expert and a weight for each slot of each token.
#pragma once

#include <cstdint>

namespace cake {

struct Slots {
  const void* __restrict__ topk_ids;      // int32 or int64 [T, 16]
  const void* __restrict__ topk_weights;  // bf16 or float32 [T, 16]
  bool ids_are_int64;
  bool weights_are_float32;
  int32_t num_experts;
};

}  // namespace cake
