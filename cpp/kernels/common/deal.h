// Items dealt out to CTAs in turn: item `cta`, then `ctas` later in every round.
#pragma once

#include <cstdint>

#include "common/nvfp4.h"

namespace cake {

CAKE_HOST_DEVICE constexpr int32_t dealt_item(int32_t round, int32_t cta, int32_t ctas) {
  return cta + round * ctas;
}

// The last, partial round if it has so few items that they can be dealt in halves, else -1. (A
// round without any item may be named: it has no halves either.)
CAKE_HOST_DEVICE constexpr int32_t halved_round(int32_t items, int32_t ctas) {
  return items % ctas * 2 <= ctas ? items / ctas : -1;
}

// The item of which a CTA has half `cta % 2` in that round.
CAKE_HOST_DEVICE constexpr int32_t halved_item(int32_t round, int32_t cta, int32_t ctas) {
  return round * ctas + cta / 2;
}

}  // namespace cake
