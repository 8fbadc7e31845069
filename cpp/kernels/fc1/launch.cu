#include "fc1/kernel_sm100.cuh"
#include "fc1/launch.h"
#include "fc1/prefill_sm90.cuh"
#include "kernel_launch.h"
#include "nvtx.h"
#include "tensor_map.h"

namespace cake {
namespace {

Status launch_sm100(const fc1::Params& params, const Plan& plan, LaunchConfig where) {
  using Config = fc1::Sm100<8>;
  CUtensorMap w13_map;
  CAKE_RETURN_IF_ERROR(make_swizzled_byte_map(params.w13,
                                              2ull * kKimiK3.num_experts * Config::kIntermediate,
                                              Config::kHidden / 2, Config::kRows, &w13_map));
  CUtensorMap input_map;
  CAKE_RETURN_IF_ERROR(make_swizzled_byte_map(
      params.input, static_cast<uint64_t>(params.num_tokens), Config::kHidden / 2, 1, &input_map));
  return with_sm100_tile_pairs(plan.tile_pairs, [&]<int kN>() {
    where.block = dim3(fc1::Sm100<kN>::kThreads + model::kEngineThreads);
    where.shared_bytes = sizeof(fc1::Sm100Storage<kN>);
    return launch("cake_fc1_sm100", where, &fc1::cake_fc1_sm100<kN>, params, w13_map, input_map);
  });
}

template <class Shape>
Status launch_prefill(const fc1::Params& params, LaunchConfig where) {
  using Config = fc1::Prefill<Shape>;
  where.block = dim3(Config::kThreads);
  where.shared_bytes = sizeof(fc1::PrefillStorage<Config>);
  CUtensorMap w13_map;
  constexpr uint64_t kAllRows = 2ull * kKimiK3.num_experts * Config::kIntermediate;
  constexpr uint64_t kRowBytes = Config::kHidden / 2;
  if constexpr (Config::kSwizzled) {
    CAKE_RETURN_IF_ERROR(
        make_swizzled_byte_map(params.w13, kAllRows, kRowBytes, Config::kBoxRows, &w13_map));
  } else {
    CAKE_RETURN_IF_ERROR(make_byte_map(params.w13, kAllRows, kRowBytes, Config::kBoxRows,
                                       Config::kRowBytes, &w13_map));
  }
  return launch("cake_fc1_prefill_sm90", where, &fc1::cake_fc1_prefill_sm90<Shape>, params,
                w13_map);
}

template <class Shape>
Status load_prefill() {
  return load_kernel("cake_fc1_prefill_sm90", &fc1::cake_fc1_prefill_sm90<Shape>,
                     sizeof(fc1::PrefillStorage<fc1::Prefill<Shape>>), Shape::kLaunchRegisters);
}

}  // namespace

static_assert(grouped_mma::Short::kTilePairs == kShortPrefillTilePairs);
static_assert(grouped_mma::Narrow::kTilePairs == kPrefillTilePairs);
static_assert(grouped_mma::Wide::kTilePairs == kWidePrefillTilePairs);

Status load_fc1(Architecture architecture) {
  if (architecture == Architecture::kSm100) {
    for (const int32_t tile_pairs : kSm100TilePairs) {
      CAKE_RETURN_IF_ERROR(with_sm100_tile_pairs(tile_pairs, [&]<int kN>() {
        return load_kernel("cake_fc1_sm100", &fc1::cake_fc1_sm100<kN>,
                           sizeof(fc1::Sm100Storage<kN>));
      }));
    }
    return {};
  }
  CAKE_RETURN_IF_ERROR(load_prefill<grouped_mma::Short>());
  CAKE_RETURN_IF_ERROR(load_prefill<grouped_mma::Narrow>());
  return load_prefill<grouped_mma::Wide>();
}

Status launch_fc1(const fc1::Params& params, const Plan& plan, void* stream) {
  const nvtx::Range range("cake/fc1");
  LaunchConfig where;
  where.grid = dim3(static_cast<unsigned>(plan.num_ctas));
  where.stream = static_cast<cudaStream_t>(stream);
  if (plan.kernels == Kernels::kSm100) {
    return launch_sm100(params, plan, where);
  }
  switch (plan.tile_pairs) {
    case kShortPrefillTilePairs:
      return launch_prefill<grouped_mma::Short>(params, where);
    case kPrefillTilePairs:
      return launch_prefill<grouped_mma::Narrow>(params, where);
    default:
      return launch_prefill<grouped_mma::Wide>(params, where);
  }
}

}  // namespace cake
