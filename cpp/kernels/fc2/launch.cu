#include "fc2/kernel_sm100.cuh"
#include "fc2/launch.h"
#include "fc2/prefill_sm90.cuh"
#include "kernel_launch.h"
#include "nvtx.h"
#include "tensor_map.h"
#include "workspace.h"

namespace cake {
namespace {

// The counter is set to 0 once in a call.
static_assert(fc2_blocks_per_part(kKimiK3, 1024, kFc2RowsBytes) == kKimiK3.hidden / kFc2BlockRows,
              "a pooled call must have one launch of FC2");

Status launch_sm100(const fc2::Params& params, const Plan& plan, LaunchConfig where) {
  return with_sm100_tile_pairs(plan.tile_pairs, [&]<int kN>() -> Status {
    using Config = fc2::Sm100<kN>;
    CUtensorMap w2_map;
    CAKE_RETURN_IF_ERROR(make_swizzled_byte_map(
        params.w2, static_cast<uint64_t>(kKimiK3.num_experts) * kKimiK3.hidden, Config::kRowBytes,
        Config::kBlockRows, &w2_map));
    CUtensorMap input_map;
    CAKE_RETURN_IF_ERROR(
        make_swizzled_byte_map(params.input, static_cast<uint64_t>(params.num_pairs),
                               Config::kRowBytes, Config::kGroupPairs, &input_map));
    where.block = dim3(Config::kThreads + model::kEngineThreads);
    where.shared_bytes = sizeof(fc2::Sm100Storage<kN>);
    return launch("cake_fc2_sm100", where, &fc2::cake_fc2_sm100<kN>, params, w2_map, input_map);
  });
}

}  // namespace

static_assert(fc2::Prefill::kTilePairs == kPrefillTilePairs);
static_assert(kKimiK3.num_experts +
                      (1024 * kKimiK3.top_k - kKimiK3.num_experts) / kShortPrefillTilePairs <=
                  fc2::Prefill::kMostTilesCut,
              "a pooled call must claim whatever its routing");

Status load_fc2(Architecture architecture) {
  if (architecture == Architecture::kSm100) {
    for (const int32_t tile_pairs : kSm100TilePairs) {
      CAKE_RETURN_IF_ERROR(with_sm100_tile_pairs(tile_pairs, [&]<int kN>() {
        return load_kernel("cake_fc2_sm100", &fc2::cake_fc2_sm100<kN>,
                           sizeof(fc2::Sm100Storage<kN>));
      }));
    }
    return {};
  }
  return load_kernel("cake_fc2_prefill_sm90", &fc2::cake_fc2_prefill_sm90,
                     sizeof(fc2::PrefillStorage), fc2::Prefill::kLaunchRegisters);
}

Status launch_fc2(const fc2::Params& params, const Plan& plan, void* stream) {
  const nvtx::Range range("cake/fc2");
  LaunchConfig where;
  where.grid = dim3(static_cast<unsigned>(plan.num_ctas));
  where.stream = static_cast<cudaStream_t>(stream);
  if (plan.kernels == Kernels::kSm100) {
    return launch_sm100(params, plan, where);
  }
  where.block = dim3(fc2::Prefill::kThreads);
  where.shared_bytes = sizeof(fc2::PrefillStorage);
  return launch("cake_fc2_prefill_sm90", where, &fc2::cake_fc2_prefill_sm90, params);
}

}  // namespace cake
