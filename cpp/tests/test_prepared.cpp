#include <gtest/gtest.h>

#include <vector>

#include "cake/fused_moe.h"
#include "prepared.h"

namespace cake {
namespace {

constexpr Device kCpu{};
constexpr Device kGpu1{DeviceType::kCuda, 1};

TEST(Prepared, TellsAddressSizeDeviceShapeAndTokenCountApart) {
  const char buffer[2] = {};
  const Shape tiny{128, 64, 4, 3};
  prepared::add(kKimiK3, buffer, 1000, 8, kCpu);
  EXPECT_TRUE(prepared::contains(kKimiK3, buffer, 1000, 8, kCpu));
  EXPECT_FALSE(prepared::contains(kKimiK3, buffer, 1000, 9, kCpu));
  EXPECT_FALSE(prepared::contains(kKimiK3, buffer, 1001, 8, kCpu));
  EXPECT_FALSE(prepared::contains(kKimiK3, buffer + 1, 1000, 8, kCpu));
  EXPECT_FALSE(prepared::contains(kKimiK3, buffer, 1000, 8, kGpu1));
  EXPECT_FALSE(prepared::contains(tiny, buffer, 1000, 8, kCpu));
  release(buffer, kCpu);
  EXPECT_FALSE(prepared::contains(kKimiK3, buffer, 1000, 8, kCpu));
}

TEST(Prepared, ReleaseForgetsEverySizeAtTheAddressAndNothingElse) {
  const char buffer[2] = {};
  prepared::add(kKimiK3, buffer, 1000, 1, kCpu);
  prepared::add(kKimiK3, buffer, 2000, kMaxTokens, kCpu);
  prepared::add(kKimiK3, buffer + 1, 1000, 1, kCpu);
  prepared::add(kKimiK3, buffer, 1000, 1, kGpu1);
  release(buffer, kCpu);
  EXPECT_FALSE(prepared::contains(kKimiK3, buffer, 1000, 1, kCpu));
  EXPECT_FALSE(prepared::contains(kKimiK3, buffer, 2000, kMaxTokens, kCpu));
  EXPECT_TRUE(prepared::contains(kKimiK3, buffer + 1, 1000, 1, kCpu));
  EXPECT_TRUE(prepared::contains(kKimiK3, buffer, 1000, 1, kGpu1));
  release(buffer + 1, kCpu);
  release(buffer, kGpu1);
}

}  // namespace
}  // namespace cake
