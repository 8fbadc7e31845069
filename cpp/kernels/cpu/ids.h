// Reading routing ids of either width.
#pragma once

#include <cstdint>

#include "cake/fused_moe.h"

namespace cake::cpu {

inline constexpr int32_t kEmptySlot = -1;

// The expert of a pair, or kEmptySlot when its id is outside [0, num_experts).
inline int32_t expert_of(const void* topk_ids, IdType type, int64_t pair, int32_t num_experts) {
  const int64_t id = type == IdType::kInt64 ? static_cast<const int64_t*>(topk_ids)[pair]
                                            : static_cast<const int32_t*>(topk_ids)[pair];
  return id >= 0 && id < num_experts ? static_cast<int32_t>(id) : kEmptySlot;
}

}  // namespace cake::cpu
