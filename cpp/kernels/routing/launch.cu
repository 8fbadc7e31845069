#include <algorithm>

#include "kernel_launch.h"
#include "nvtx.h"
#include "routing/kernel.cuh"
#include "routing/launch.h"
#include "workspace.h"

namespace cake {
namespace {

// Above this a cluster shares the routing.
constexpr int32_t kSingleCtaTokens = routing::Sort<false>::kMostPairs / kKimiK3.top_k;
static_assert(kChunkTokens * kKimiK3.top_k <= routing::Sort<true>::kMostPairs);

constexpr size_t kSharedBytes = sizeof(routing::Sort<true>::Storage);
static_assert(kSharedBytes >= sizeof(routing::Sort<false>::Storage));
static_assert(kSharedBytes >= sizeof(routing::FewStorage));

}  // namespace

Status load_route_quantize() {
  CAKE_RETURN_IF_ERROR(
      load_kernel("cake_route_quantize", &routing::cake_route_quantize<true>, kSharedBytes));
  return load_kernel("cake_route_quantize", &routing::cake_route_quantize<false>, kSharedBytes);
}

Status launch_route_quantize(const RouteQuantizeArguments& a) {
  const nvtx::Range range("cake/route_quantize");
  constexpr int32_t kGroups = kKimiK3.hidden / kGroupSize;
  routing::Params params{};
  params.topk_ids = a.topk_ids;
  params.ids_are_int64 = a.topk_ids_type == IdType::kInt64;
  params.num_pairs = a.num_tokens * kKimiK3.top_k;
  params.tile_pairs = a.tile_pairs;
  params.expert_pairs = a.expert_pairs;
  params.tiles = a.tiles;
  params.num_tiles = a.num_tiles;
  params.work_counter = a.work_counter;
  params.range_counters = a.range_counters;
  params.input = static_cast<const uint16_t*>(a.input);
  params.input_scale = a.input_scale;
  params.packed = static_cast<uint2*>(a.packed);
  params.sf = static_cast<uint8_t*>(a.sf);
  params.halves = static_cast<uint32_t*>(a.halves);
  params.input_stride = a.input_stride;
  params.num_groups = a.num_tokens * kGroups;
  params.groups = kGroups;

  const uint32_t cluster = a.num_tokens > kSingleCtaTokens ? routing::kLargeCluster : 1;
  // As many as there is room for at the same time: a CTA fills an SM.
  const uint32_t needed =
      static_cast<uint32_t>((params.num_groups + routing::kThreads - 1) / routing::kThreads);
  const uint32_t quantizers =
      std::min((needed + cluster - 1) / cluster * cluster,
               (std::max(static_cast<uint32_t>(a.num_sms) / cluster, 2u) - 1) * cluster);
  LaunchConfig where;
  where.grid = dim3(cluster + quantizers);
  where.block = dim3(routing::kThreads);
  where.cluster = cluster;
  where.shared_bytes = kSharedBytes;
  where.stream = static_cast<cudaStream_t>(a.stream);
  return launch("cake_route_quantize", where,
                rows_are_aligned(a.input, a.input_stride) ? &routing::cake_route_quantize<true>
                                                          : &routing::cake_route_quantize<false>,
                params);
}

}  // namespace cake
