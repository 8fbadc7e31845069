#include "plan.h"

namespace cake {
namespace {

constexpr int32_t kDecodeTilePairs = 8;
constexpr int32_t kPrefillTilePairs = 160;
// Up to 5 pairs per expert at this count: tiles of 8 seldom stream an expert's weights twice.
constexpr int32_t kMostDecodeTokens = 288;

}  // namespace

Plan make_plan(int32_t num_tokens, int32_t num_sms) {
  const bool decode = num_tokens <= kMostDecodeTokens;
  return {.kernels = decode ? Kernels::kDecode : Kernels::kPrefill,
          .tile_pairs = decode ? kDecodeTilePairs : kPrefillTilePairs,
          .num_ctas = num_sms};
}

}  // namespace cake
