// The unit of matrix work: a few pairs of one expert.
#pragma once

#include <cstdint>

namespace cake {

struct alignas(16) Tile {
  int32_t expert;
  int32_t first;  // index into expert_pairs
  int32_t count;  // pairs, at most the plan's tile size
  int32_t unused;
};

}  // namespace cake
