#include "plan.h"

#include <cstdlib>
#include <sstream>
#include <string_view>

#include "workspace.h"

namespace cake {
namespace {

// Measured on an H200 (docs/performance.md).
constexpr int32_t kMostDecodeTokens = 352;

}  // namespace

bool batch_invariant_by_environment() {
  static const bool value = [] {
    const char* text = std::getenv("CAKE_BATCH_INVARIANT");
    return text != nullptr && std::string_view(text) == "1";
  }();
  return value;
}

Plan make_plan(int32_t num_tokens, int32_t num_sms, bool batch_invariant) {
  const bool decode = num_tokens <= kMostDecodeTokens && !batch_invariant;
  return {.kernels = decode ? Kernels::kDecode : Kernels::kPrefill,
          .tile_pairs = decode ? kDecodeTilePairs : kPrefillTilePairs,
          .num_ctas = num_sms};
}

std::string plan_text(int32_t num_tokens, bool batch_invariant) {
  const Plan plan = make_plan(num_tokens, 1, batch_invariant || batch_invariant_by_environment());
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
