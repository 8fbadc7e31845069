#include <gtest/gtest.h>

#include <random>

#include "cpu/stages.h"

namespace cake::cpu {
namespace {

struct Routed {
  std::vector<int32_t> offsets, pairs;
};

template <class Id>
Routed route_ids(const std::vector<Id>& ids, int32_t num_experts) {
  Routed out{std::vector<int32_t>(num_experts + 1, -7), std::vector<int32_t>(ids.size(), -7)};
  route({.topk_ids = ids.data(),
         .topk_ids_type = sizeof(Id) == 8 ? IdType::kInt64 : IdType::kInt32,
         .num_pairs = static_cast<int64_t>(ids.size()),
         .num_experts = num_experts,
         .expert_offsets = out.offsets.data(),
         .expert_pairs = out.pairs.data()});
  return out;
}

TEST(Routing, IsStableByTokenThenSlot) {
  const Routed r = route_ids<int32_t>({2, 0, 2, 1, 0, 2}, 4);
  EXPECT_EQ(r.offsets, (std::vector<int32_t>{0, 2, 3, 6, 6}));
  EXPECT_EQ(r.pairs, (std::vector<int32_t>{1, 4, 3, 0, 2, 5}));
}

TEST(Routing, LeavesOutIdsOutsideTheExperts) {
  const Routed r = route_ids<int32_t>({-1, 3, INT32_MAX, 0, INT32_MIN, 4}, 4);
  EXPECT_EQ(r.offsets, (std::vector<int32_t>{0, 1, 1, 1, 2}));
  EXPECT_EQ(std::vector(r.pairs.begin(), r.pairs.begin() + 2), (std::vector<int32_t>{3, 1}));
}

TEST(Routing, Int64IdsThatDoNotFitAreEmpty) {
  const Routed r = route_ids<int64_t>({int64_t{1} << 32, 3, -1, (int64_t{1} << 32) + 2}, 4);
  EXPECT_EQ(r.offsets, (std::vector<int32_t>{0, 0, 0, 0, 1}));
  EXPECT_EQ(r.pairs[0], 1);
}

TEST(Routing, RandomIdsGiveEveryPairOnceInOrder) {
  std::mt19937 rng(1);
  std::vector<int32_t> ids(16 * 1000);
  for (auto& id : ids) {
    id = static_cast<int32_t>(rng() % 896);
  }
  const Routed r = route_ids(ids, 896);
  EXPECT_EQ(r.offsets.back(), 16000);
  for (int32_t expert = 0; expert < 896; ++expert) {
    for (int32_t i = r.offsets[expert]; i < r.offsets[expert + 1]; ++i) {
      EXPECT_EQ(ids[r.pairs[i]], expert);
      EXPECT_TRUE(i == r.offsets[expert] || r.pairs[i - 1] < r.pairs[i]);
    }
  }
}

}  // namespace
}  // namespace cake::cpu
