// The workspace of one call: which region lies where. Host and kernels take offsets from here only.
//
//   region          bytes                     lifetime
//   situ_beta       E * 4                     prepare -> forever (fixed prefix, any token count)
//   situ_linear     E * 4                     prepare -> forever
//   input_packed    T * H/2                   quantize -> fc1
//   input_sf        T * H/16                  quantize -> fc1   (linear)
//   expert_offsets  (E + 1) * 4               route -> fc1, fc2
//   expert_pairs    P * 4                     route -> fc1, fc2 (pairs by expert, token, slot)
//   fc1_packed      P * I/2                   fc1 -> fc2        (row = pair)
//   fc1_sf          P * I/16                  fc1 -> fc2        (linear)
//   fc2_rows        P * kFc2BlockRows * 2     fc2 -> finalize   (one block of output rows at a
//   time)
//
// T tokens, P = T * top_k pairs; pair p is slot p % top_k of token p / top_k.
#pragma once

#include <array>
#include <cstdint>

#include "cake/fused_moe.h"

namespace cake {

inline constexpr int32_t kFc2BlockRows = 128;  // output columns finalized together

struct Region {
  const char* name = "";
  int64_t offset = 0;  // bytes, a multiple of kWorkspaceAlignment
  int64_t bytes = 0;
};

struct Workspace {
  Region situ_beta;
  Region situ_linear_beta;
  Region input_packed;
  Region input_sf;
  Region expert_offsets;
  Region expert_pairs;
  Region fc1_packed;
  Region fc1_sf;
  Region fc2_rows;
  int64_t total_bytes = 0;

  Workspace(const Shape& shape, int32_t num_tokens);

  // All regions, in the order of their offsets.
  std::array<const Region*, 9> regions() const {
    return {&situ_beta,    &situ_linear_beta, &input_packed, &input_sf, &expert_offsets,
            &expert_pairs, &fc1_packed,       &fc1_sf,       &fc2_rows};
  }
};

template <class T>
T* region_pointer(void* workspace, const Region& region) {
  return reinterpret_cast<T*>(static_cast<char*>(workspace) + region.offset);
}

}  // namespace cake
