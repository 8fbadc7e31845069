// The public interface: validate, then hand over to the device's implementation.
#include "cake/fused_moe.h"

#include <algorithm>
#include <array>

#include "cpu/parallel.h"
#include "cpu/stages.h"
#include "device.h"
#include "message.h"
#include "names.h"
#include "prepared.h"
#include "workspace.h"

namespace cake {
namespace {

Status check_shape(const Shape& s) {
  if (s.hidden <= 0 || s.hidden % 128 != 0 || s.intermediate <= 0 || s.intermediate % 64 != 0 ||
      s.num_experts <= 0 || s.top_k <= 0) {
    return invalid_argument(
        "shape: expected hidden a multiple of 128, intermediate of 64, at least one ",
        "expert and slot; got hidden=", s.hidden, ", intermediate=", s.intermediate,
        ", num_experts=", s.num_experts, ", top_k=", s.top_k);
  }
  return {};
}

Status check_num_tokens(int32_t num_tokens) {
  if (num_tokens < 0 || num_tokens > kMaxTokens) {
    return invalid_argument("num_tokens: expected 0 to ", kMaxTokens, ", got ", num_tokens);
  }
  return {};
}

Status check_workspace(const Shape& shape, const void* workspace, int64_t bytes, int32_t num_tokens,
                       Device device) {
  const int64_t needed = workspace_bytes(shape, num_tokens);
  if (workspace == nullptr) {
    return invalid_argument("workspace_buffer: expected a prepared buffer of ", needed,
                            " bytes, got a null pointer; allocate it and prepare it with "
                            "cake_fused_moe_prepare_workspace");
  }
  // A CPU allocator gives 64 bytes, and no instruction of the CPU path needs more.
  const int64_t alignment = device.type == DeviceType::kCpu ? 64 : kWorkspaceAlignment;
  if (reinterpret_cast<uintptr_t>(workspace) % static_cast<uintptr_t>(alignment) != 0) {
    return invalid_argument("workspace_buffer: expected an address aligned to ", alignment,
                            " bytes, got ", workspace);
  }
  if (bytes < needed) {
    return invalid_argument("workspace_buffer: expected at least ", needed, " bytes for ",
                            num_tokens, " tokens, got ", bytes);
  }
  return {};
}

struct Span {
  const char* name;
  const void* data;
  int64_t bytes;

  bool overlaps(const Span& other) const {
    const auto a = reinterpret_cast<uintptr_t>(data);
    const auto b = reinterpret_cast<uintptr_t>(other.data);
    return bytes > 0 && other.bytes > 0 && a < b + static_cast<uintptr_t>(other.bytes) &&
           b < a + static_cast<uintptr_t>(bytes);
  }
};

// Every operand is there, and nothing written overlaps anything else.
Status check_operands(const Arguments& a) {
  const int64_t h = a.shape.hidden;
  const int64_t i = a.shape.intermediate;
  const int64_t e = a.shape.num_experts;
  const int64_t pairs = int64_t{a.num_tokens} * a.shape.top_k;
  const int64_t experts_bytes = e * int64_t{sizeof(float)};
  const std::array<Span, 13> reads{{
      {names::kInput, a.input, 2 * ((a.num_tokens - 1) * a.input_stride + h)},
      {names::kTopkIds, a.topk_ids, pairs * (a.topk_ids_type == IdType::kInt64 ? 8 : 4)},
      {names::kTopkWeights, a.topk_weights,
       pairs * (a.topk_weights_type == WeightType::kFloat32 ? 4 : 2)},
      {names::kW13, a.w13, e * 2 * i * h / 2},
      {names::kW2, a.w2, e * h * i / 2},
      {names::kInputScale, a.input_scale, int64_t{sizeof(float)}},
      {names::kW13Sf, a.w13_sf, e * 2 * i * h / kGroupSize},
      {names::kFc1Alpha, a.fc1_alpha, experts_bytes},
      {names::kFc2InputScale, a.fc2_input_scale, experts_bytes},
      {names::kW2Sf, a.w2_sf, e * h * i / kGroupSize},
      {names::kFc2Alpha, a.fc2_alpha, experts_bytes},
      {names::kSituBeta, a.situ_beta, a.situ_beta != nullptr ? experts_bytes : 0},
      {names::kSituLinearBeta, a.situ_linear_beta,
       a.situ_linear_beta != nullptr ? experts_bytes : 0},
  }};
  const Span output{names::kOutput, a.output, 2 * a.num_tokens * h};
  const Span workspace{names::kWorkspace, a.workspace, a.workspace_bytes};

  for (const Span& span : reads) {
    if (span.bytes > 0 && span.data == nullptr) {
      return invalid_argument(span.name, ": expected data, got a null pointer");
    }
    for (const Span* written : {&output, &workspace}) {
      if (written->overlaps(span)) {
        return invalid_argument(
            written->name, ": expected memory of its own, got memory that overlaps ", span.name);
      }
    }
  }
  if (output.data == nullptr) {
    return invalid_argument("output: expected data, got a null pointer");
  }
  if (output.overlaps(workspace)) {
    return invalid_argument(
        "output: expected memory of its own, got memory that overlaps workspace_buffer");
  }
  return {};
}

Status check_device(Device device) {
  if (device.type == DeviceType::kCpu) {
    return {};
  }
  int32_t major = 0;
  int32_t minor = 0;
  CAKE_RETURN_IF_ERROR(device::compute_capability(device.index, &major, &minor));
  return cuda_support(major, minor);
}

// On the CPU the prepared constants can be looked at: were they overwritten, or the memory given
// back and taken anew, since preparation?
Status check_constants(const Arguments& a) {
  const Workspace layout(a.shape, a.num_tokens);
  const auto holds = [&](const Region& region, float value) {
    const float* first = region_pointer<float>(a.workspace, region);
    return std::all_of(first, first + a.shape.num_experts, [&](float x) { return x == value; });
  };
  if ((a.situ_beta == nullptr && !holds(layout.situ_beta, kDefaultSituBeta)) ||
      (a.situ_linear_beta == nullptr && !holds(layout.situ_linear_beta, kDefaultSituLinearBeta))) {
    return invalid_argument(
        names::kWorkspace,
        ": expected the SiTU constants that preparation wrote, got other bytes; prepare the buffer "
        "again, or pass situ_beta and situ_linear_beta when others write to it between calls");
  }
  return {};
}

}  // namespace

Status cuda_support(int32_t major, int32_t minor) {
  return error(StatusCode::kUnsupported,
               "device: this version of cake runs fused_moe on CPU tensors only, got CUDA compute "
               "capability ",
               major, ".", minor);
}

Status prepare(const Shape& shape, void* workspace, int64_t bytes, int32_t num_tokens,
               Device device, void*) {
  CAKE_RETURN_IF_ERROR(check_shape(shape));
  CAKE_RETURN_IF_ERROR(check_num_tokens(num_tokens));
  if (num_tokens == 0) {
    return {};
  }
  CAKE_RETURN_IF_ERROR(check_workspace(shape, workspace, bytes, num_tokens, device));
  CAKE_RETURN_IF_ERROR(check_device(device));
  const Workspace layout(shape, num_tokens);
  auto* const beta = region_pointer<float>(workspace, layout.situ_beta);
  auto* const linear_beta = region_pointer<float>(workspace, layout.situ_linear_beta);
  std::fill_n(beta, shape.num_experts, kDefaultSituBeta);
  std::fill_n(linear_beta, shape.num_experts, kDefaultSituLinearBeta);
  prepared::add(shape, workspace, bytes, num_tokens, device);
  return {};
}

Status check_prepared(const Shape& shape, const void* workspace, int64_t bytes, int32_t num_tokens,
                      Device device) {
  if (!prepared::contains(shape, workspace, bytes, num_tokens, device)) {
    return invalid_argument("workspace_buffer: expected a buffer prepared for ", num_tokens,
                            " tokens, got one that is not; call cake_fused_moe_prepare_workspace("
                            "workspace_buffer, ",
                            num_tokens, ") once before the first call");
  }
  return {};
}

void release(const void* workspace, Device device) { prepared::remove(workspace, device); }

Status run(const Arguments& a) {
  CAKE_RETURN_IF_ERROR(check_shape(a.shape));
  CAKE_RETURN_IF_ERROR(check_num_tokens(a.num_tokens));
  if (a.num_tokens == 0) {
    return {};
  }
  CAKE_RETURN_IF_ERROR(check_device(a.device));
  CAKE_RETURN_IF_ERROR(check_operands(a));
  CAKE_RETURN_IF_ERROR(
      check_workspace(a.shape, a.workspace, a.workspace_bytes, a.num_tokens, a.device));
  CAKE_RETURN_IF_ERROR(
      check_prepared(a.shape, a.workspace, a.workspace_bytes, a.num_tokens, a.device));
  CAKE_RETURN_IF_ERROR(check_constants(a));
  cpu::fused_moe(a);
  return {};
}

Status quantize_nvfp4(const QuantizeArguments& a) {
  if (a.rows < 0 || a.columns < 0 || a.columns % kGroupSize != 0) {
    return invalid_argument("input: expected [rows, columns] with columns a multiple of ",
                            kGroupSize, ", got [", a.rows, ", ", a.columns, "]");
  }
  if (a.rows == 0 || a.columns == 0) {
    return {};
  }
  if (a.device.type == DeviceType::kCpu) {
    cpu::quantize(a, a.executor != nullptr ? *a.executor : cpu::default_executor());
    return {};
  }
  const device::CurrentDevice guard(a.device.index);
  CAKE_RETURN_IF_ERROR(guard.status());
  return device::quantize(a);
}

Status run_selftest(int32_t* out, int64_t count, Device device, void* stream) {
  if (device.type == DeviceType::kCpu) {
    for (int64_t i = 0; i < count; ++i) {
      out[i] = static_cast<int32_t>(i % 1000);
    }
    return {};
  }
  const device::CurrentDevice guard(device.index);
  CAKE_RETURN_IF_ERROR(guard.status());
  return device::selftest(out, count, stream);
}

}  // namespace cake
