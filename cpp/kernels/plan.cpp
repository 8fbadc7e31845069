#include "plan.h"

#include <algorithm>
#include <sstream>

#include "environment.h"
#include "workspace.h"

namespace cake {
namespace {

// Measured on an H200 (docs/performance.md). With random routing the decode and prefill kernels
// cross near 256 tokens; with a skewed one the decode kernels are slower before that.
constexpr int32_t kMostDecodeTokens = 128;
// Above, most experts have more than 88 pairs: FC1 takes up to 176 at a time, FC2 half of a tile.
constexpr int32_t kMostNarrowTokens = 5504;

// Most pairs of a tile of the prefill kernels on sm_90.
int32_t prefill_tile_pairs(int32_t num_tokens) {
  // Up to here the fullest expert of uniform routing has at most 64 pairs, typically.
  constexpr int32_t kMostShortTokens = 2048;
  if (num_tokens <= kMostShortTokens) {
    return kShortPrefillTilePairs;
  }
  return num_tokens <= kMostNarrowTokens ? kPrefillTilePairs : kWidePrefillTilePairs;
}

// Most pairs of a tile on sm_100, where it costs only shared memory: the matrix instructions have
// as many columns as the tile has pairs. A stage holds 18 KB of weights and 128 bytes for each of
// these pairs, so that 10, 10, 9, 8 or 6 stages fit. An expert with more pairs has a second tile
// and reads its weights again.
//   * Up to 64 tokens no expert has more pairs than there are tokens: one tile, whatever the
//     routing.
//   * Up to 2048 tokens the fullest expert of uniform routing has at most 64 pairs, typically (57).
//   * Above, 128: 6 stages still keep 110 KB of weights of an SM in flight, and 8 TB/s times a
//     latency of 1 us is 54 KB of each of 148 SMs.
int32_t sm100_tile_pairs(int32_t num_tokens) {
  constexpr int32_t kMostTokensOf64 = 2048;
  if (num_tokens > kMostTokensOf64) {
    return 128;
  }
  return *std::lower_bound(kSm100TilePairs.begin(), kSm100TilePairs.end(),
                           std::min(num_tokens, 64));
}

// FC2's rows, in bytes, of one launch on sm_100: finalize reads them from L2 (126 MB), which
// streams of weights pass through as well. A pooled call has one launch. On sm_90 (60 MB of L2)
// parts that fit were slower than few large ones (docs/performance.md).
int64_t sm100_part_bytes(int32_t num_tokens) {
  constexpr int32_t kMostPooledTokens = 1024;
  return num_tokens <= kMostPooledTokens ? kFc2RowsBytes : 80 << 20;
}

// What FC2 leaves to be claimed at the pooled token counts. A claim is about a 24th of all that a
// CTA does where it does little, so that the CTAs end together; two blocks otherwise, to hide the
// claims. On sm_90 the warps that multiply (or unpack) make a tile's pairs ready for every claim,
// which costs a third of a block (a sixth): there the pool is an eighth instead of a quarter.
WorkPool fc2_pool(int32_t num_tokens, const Gpu& gpu) {
  if (!is_pooled(num_tokens)) {
    return {};
  }
  const int32_t most_blocks = num_tokens * kKimiK3.top_k * (kKimiK3.hidden / kFc2BlockRows);
  return {.part = gpu.architecture == Architecture::kSm90 ? 8 : 4,
          .claim_blocks = std::clamp(most_blocks / gpu.num_sms / 24, 1, 2)};
}

const char* kernels_name(Kernels kernels) {
  switch (kernels) {
    case Kernels::kDecode:
      return "decode";
    case Kernels::kPrefill:
      return "prefill";
    case Kernels::kSm100:
      return "sm100";
  }
  return "";
}

}  // namespace

bool batch_invariant_by_environment() {
  static const bool value = is_switched_on("CAKE_BATCH_INVARIANT");
  return value;
}

Plan make_plan(int32_t num_tokens, const Gpu& gpu, bool batch_invariant) {
  if (gpu.architecture == Architecture::kSm100) {
    // One kernel: tiles of any size take the same instructions in the same order along K.
    return {.kernels = Kernels::kSm100,
            .tile_pairs = sm100_tile_pairs(num_tokens),
            .num_ctas = gpu.num_sms,
            .fc2_blocks = fc2_blocks_per_part(kKimiK3, num_tokens, sm100_part_bytes(num_tokens)),
            .fc2_tile_parts = 1,
            .fc2_finalizes = false,
            .fc2_pool = fc2_pool(num_tokens, gpu)};
  }
  const bool decode = num_tokens <= kMostDecodeTokens && !batch_invariant;
  return {.kernels = decode ? Kernels::kDecode : Kernels::kPrefill,
          .tile_pairs = decode ? kDecodeTilePairs : prefill_tile_pairs(num_tokens),
          .num_ctas = gpu.num_sms,
          .fc2_blocks = fc2_blocks_per_part(kKimiK3, num_tokens, kFc2RowsBytes),
          .fc2_tile_parts = num_tokens <= kMostNarrowTokens ? 1 : 2,
          .fc2_finalizes = decode && num_tokens == 1 && gpu.num_sms >= kFinalizingCtas,
          .fc2_pool = fc2_pool(num_tokens, gpu)};
}

std::string plan_text(int32_t num_tokens, bool batch_invariant, int32_t major, int32_t num_sms) {
  const Gpu gpu{major >= 10 ? Architecture::kSm100 : Architecture::kSm90, num_sms};
  const int32_t chunk = tokens_per_chunk(num_tokens);
  const Plan plan = make_plan(chunk, gpu, batch_invariant || batch_invariant_by_environment());
  const int32_t blocks = kKimiK3.hidden / kFc2BlockRows;
  const int32_t part = plan.fc2_blocks;
  std::ostringstream json;
  json << R"({"kernels": ")" << kernels_name(plan.kernels) << R"(", "tile_pairs": )"
       << plan.tile_pairs << R"(, "tokens_per_chunk": )" << chunk << R"(, "fc2_parts": )"
       << (blocks + part - 1) / part << R"(, "fc2_columns_per_part": )" << part * kFc2BlockRows
       << R"(, "fc2_pool_part": )" << plan.fc2_pool.part << R"(, "fc2_pool_rows": )"
       << plan.fc2_pool.claim_blocks * kFc2BlockRows << R"(, "fc2_finalizes": )"
       << (plan.fc2_finalizes ? "true}" : "false}");
  return std::move(json).str();
}

}  // namespace cake
