#include "plan.h"

#include <sstream>

#include "workspace.h"

namespace cake {
namespace {

// Measured on an H200 (docs/performance.md), the decode kernels before step 2 made them faster: at
// 512 tokens 950 us with the decode kernels, 1146 us with the prefill kernels; at 1024 tokens 1646
// and 1276 us. In between the first grow by 1.36 us a token.
constexpr int32_t kMostDecodeTokens = 640;

}  // namespace

Plan make_plan(int32_t num_tokens, int32_t num_sms) {
  const bool decode = num_tokens <= kMostDecodeTokens;
  return {.kernels = decode ? Kernels::kDecode : Kernels::kPrefill,
          .tile_pairs = decode ? kDecodeTilePairs : kPrefillTilePairs,
          .num_ctas = num_sms};
}

std::string plan_text(int32_t num_tokens) {
  const Plan plan = make_plan(num_tokens, 1);
  const int32_t blocks = kKimiK3.hidden / kFc2BlockRows;
  const int32_t part = fc2_blocks_per_part(kKimiK3, num_tokens);
  std::ostringstream json;
  json << R"({"kernels": ")" << (plan.kernels == Kernels::kDecode ? "decode" : "prefill")
       << R"(", "tile_pairs": )" << plan.tile_pairs << R"(, "fc2_parts": )"
       << (blocks + part - 1) / part << R"(, "fc2_columns_per_part": )" << part * kFc2BlockRows
       << "}";
  return std::move(json).str();
}

}  // namespace cake
