#include <gtest/gtest.h>

#include <vector>

#include "common/deal.h"

namespace cake {
namespace {

// As HalvedItems in common/items.cuh walks them.
TEST(Deal, EveryHalfOfEveryItemBelongsToOneCtaAndHalvesComeLast) {
  for (const int32_t ctas : {1, 2, 3, 78, 132, 133}) {
    for (int32_t items = 0; items <= 3 * ctas; ++items) {
      const int32_t halved = halved_round(items, ctas);
      ASSERT_EQ(halved >= 0, items % ctas <= ctas / 2) << items << " " << ctas;
      std::vector<int32_t> halves(2 * items);
      for (int32_t cta = 0; cta < ctas; ++cta) {
        bool halved_before = false;
        for (int32_t round = 0;; ++round) {
          const bool is_half = round == halved;
          const int32_t item =
              is_half ? halved_item(round, cta, ctas) : dealt_item(round, cta, ctas);
          if (item >= items) {
            break;
          }
          ASSERT_FALSE(halved_before);
          halved_before = is_half;
          for (const int32_t half : {0, 1}) {
            halves.at(2 * item + half) += !is_half || half == cta % 2 ? 1 : 0;
          }
        }
      }
      ASSERT_EQ(halves, std::vector<int32_t>(2 * items, 1)) << items << " " << ctas;
    }
  }
}

}  // namespace
}  // namespace cake
