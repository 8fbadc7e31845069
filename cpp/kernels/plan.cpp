#include "plan.h"

#include <sstream>

#include "workspace.h"

namespace cake {
namespace {

// Measured on an H200 (docs/performance.md).
constexpr int32_t kMostDecodeTokens = 352;

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
  const int32_t chunk = tokens_per_chunk(num_tokens);
  const int32_t part = fc2_blocks_per_part(kKimiK3, chunk);
  std::ostringstream json;
  json << R"({"kernels": ")" << (plan.kernels == Kernels::kDecode ? "decode" : "prefill")
       << R"(", "tile_pairs": )" << plan.tile_pairs << R"(, "tokens_per_chunk": )" << chunk
       << R"(, "fc2_parts": )" << (blocks + part - 1) / part << R"(, "fc2_columns_per_part": )"
       << part * kFc2BlockRows << "}";
  return std::move(json).str();
}

}  // namespace cake
