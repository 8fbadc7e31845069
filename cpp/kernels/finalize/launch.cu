#include "cake/fused_moe.h"
#include "finalize/kernel.cuh"
#include "finalize/launch.h"
#include "kernel_launch.h"
#include "nvtx.h"

namespace cake {

Status load_finalize() { return load_kernel("cake_finalize", &finalize::cake_finalize); }

Status launch_finalize(const FinalizeArguments& a) {
  const nvtx::Range range("cake/finalize");
  finalize::Params params{};
  params.slots = a.slots;
  params.rows = static_cast<const uint16_t*>(a.rows);
  params.output = static_cast<uint16_t*>(a.output);
  params.columns = a.columns;
  params.output_stride = kKimiK3.hidden;
  params.num_tokens = a.num_tokens;
  const int64_t threads = int64_t{a.num_tokens} * (a.columns / finalize::kColumns);
  LaunchConfig where;
  where.grid = dim3(static_cast<unsigned>((threads + finalize::kThreads - 1) / finalize::kThreads));
  where.block = dim3(finalize::kThreads);
  where.stream = static_cast<cudaStream_t>(a.stream);
  return launch("cake_finalize", where, &finalize::cake_finalize, params);
}

}  // namespace cake
