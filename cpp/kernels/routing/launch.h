#pragma once

#include "cake/fused_moe.h"
#include "common/tile.h"
#include "common/work_pool.h"

namespace cake {

struct RouteQuantizeArguments {
  const void* topk_ids;  // [T, 16]
  IdType topk_ids_type;
  int32_t num_tokens;  // T
  int32_t tile_pairs;  // most pairs of a tile
  int32_t* expert_pairs;
  Tile* tiles;
  int32_t* num_tiles;
  int32_t* work_counter;
  RangeCounters* range_counters;
  const void* input;  // bf16 [T, 3584]
  int64_t input_stride;
  const float* input_scale;
  void* packed;  // [T, 1792]
  void* sf;      // [T, 224]
  void* halves;  // half [T, 3584] for the prefill kernels, or null
  int32_t num_sms;
  void* stream;
};

// Routing and input quantization in one launch, on the current device.
Status launch_route_quantize(const RouteQuantizeArguments& arguments);

// Loads the kernel and sets its attributes; part of preparation.
Status load_route_quantize();

}  // namespace cake
