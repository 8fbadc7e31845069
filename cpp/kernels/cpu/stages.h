// The stages of the CPU path, one function each, in the order of a call. Every stage reads what an
// earlier one wrote and can be tested by itself. Results do not depend on the number of workers.
//
//   quantize -> route -> fc1 (SiTU, requantize) -> for each block of output rows: fc2 -> finalize
//
// T tokens, k = top_k, P = T * k pairs; pair p is slot p % k of token p / k.
#pragma once

#include <cstdint>

#include "cake/fused_moe.h"

namespace cake::cpu {

// NVFP4 rows: packed codes and linear E4M3 scales.
struct QuantizedRows {
  const uint8_t* packed;  // [rows, columns/2]
  const uint8_t* sf;      // [rows, columns/16]
};

// Recipe P. Inputs and outputs as in QuantizeArguments.
void quantize(const QuantizeArguments& arguments, const CpuExecutor& executor);

struct RouteArguments {
  const void* topk_ids;  // [P]
  IdType topk_ids_type;
  int64_t num_pairs;
  int32_t num_experts;
  int32_t* expert_offsets;  // out [E + 1]: pairs of expert e are expert_pairs[offsets[e] ..
                            // offsets[e+1])
  int32_t* expert_pairs;    // out [P]: first offsets[E] entries; by expert, then token, then slot
};
// Counting sort; pairs with an id outside [0, E) are left out.
void route(const RouteArguments& arguments);

struct Route {
  const int32_t* expert_offsets;  // [E + 1]
  const int32_t* expert_pairs;
};

struct Fc1Arguments {
  Shape shape;
  Route route;
  QuantizedRows input;            // [T]
  const uint8_t* w13;             // [E, 2I, H/2] prepared
  const uint8_t* w13_sf;          // [E, 2I, H/16] prepared, interleaved
  const float* fc1_alpha;         // [E]
  const float* fc2_input_scale;   // [E]
  const float* situ_beta;         // [E]
  const float* situ_linear_beta;  // [E]
  uint8_t* packed;                // out [P, I/2], rows of empty slots untouched
  uint8_t* sf;                    // out [P, I/16]
  float* activation = nullptr;    // optional out [P, I]: what was quantized
};
void fc1(const Fc1Arguments& arguments, const CpuExecutor& executor);

struct Fc2Arguments {
  Shape shape;
  Route route;
  QuantizedRows intermediate;  // [P]
  const uint8_t* w2;           // [E, H, I/2] prepared
  const uint8_t* w2_sf;        // [E, H, I/16] prepared, interleaved
  const float* fc2_alpha;      // [E]
  int32_t first_row;           // first output of the block, a multiple of 128
  uint16_t* rows;              // out bf16 [P, 128], rows of empty slots untouched
};
// One block of 128 outputs of every pair.
void fc2(const Fc2Arguments& arguments, const CpuExecutor& executor);

struct FinalizeArguments {
  Shape shape;
  int32_t num_tokens;
  const void* topk_ids;  // [T, k]
  IdType topk_ids_type;
  const void* topk_weights;  // [T, k]
  WeightType topk_weights_type;
  int32_t first_row;
  const uint16_t* rows;  // bf16 [P, 128]
  uint16_t* output;      // out bf16 [T, H]: columns first_row .. first_row + 127
};
// float32 sum over slots in ascending order by fused multiply-add; empty slots add nothing.
void finalize(const FinalizeArguments& arguments, const CpuExecutor& executor);

// All stages; arguments must have been validated.
void fused_moe(const Arguments& arguments);

}  // namespace cake::cpu
