// The public interface: validate, then hand over to the device's implementation.
#include "cake/fused_moe.h"

#include <algorithm>
#include <array>
#include <exception>

#include "cpu/parallel.h"
#include "cpu/stages.h"
#include "device.h"
#include "message.h"
#include "names.h"
#include "nvtx.h"
#include "prepared.h"
#include "span.h"
#include "workspace.h"

namespace cake {
namespace {

Status check_shape(const Shape& s) {
  if (!is_supported(s)) {
    return invalid_argument(
        "shape: expected hidden a multiple of 128 and intermediate of 64 (both up to 65536), 1 to "
        "65536 experts and 1 to 1024 slots; got hidden=",
        s.hidden, ", intermediate=", s.intermediate, ", num_experts=", s.num_experts,
        ", top_k=", s.top_k);
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
  if (a.device.type == DeviceType::kCuda) {  // wide loads, stores and bulk copies
    for (const Span& span :
         {Span{names::kOutput, a.output, 0}, Span{names::kW13, a.w13, 0}, Span{names::kW2, a.w2, 0},
          Span{names::kW13Sf, a.w13_sf, 0}, Span{names::kW2Sf, a.w2_sf, 0}}) {
      if (reinterpret_cast<uintptr_t>(span.data) % 16 != 0) {
        return invalid_argument(span.name, ": expected an address aligned to 16 bytes, got ",
                                span.data, "; call .clone()");
      }
    }
  }
  return check_memory(reads, {{names::kOutput, a.output, 2 * a.num_tokens * h},
                              {names::kWorkspace, a.workspace, a.workspace_bytes}});
}

// -1 stands for contiguous rows of `columns`.
Status resolve_stride(int64_t columns, int64_t* stride) {
  if (*stride < -1) {
    return invalid_argument(
        names::kInput, ": expected a row stride of at least 0 (-1: contiguous), got ", *stride);
  }
  *stride = *stride == -1 ? columns : *stride;
  return {};
}

// No exception crosses the public interface.
template <class Function>
Status guarded(const Function& function) {
  try {
    return function();
  } catch (const std::exception& exception) {
    return error(StatusCode::kRuntimeError, exception.what());
  }
}

Status check_device(Device device, const Shape& shape) {
  if (device.type == DeviceType::kCpu) {
    return {};
  }
  if (shape != kKimiK3) {
    return error(
        StatusCode::kUnsupported,
        "shape: expected hidden=3584, intermediate=384, num_experts=896, top_k=16 on a GPU");
  }
  int32_t major = 0;
  int32_t minor = 0;
  CAKE_RETURN_IF_ERROR(device::compute_capability(device.index, &major, &minor));
  return cuda_support(major, minor);
}

// On the CPU the prepared constants can be looked at: were they overwritten, or the memory given
// back and taken anew, since preparation?
Status check_constants(const Arguments& a) {
  const WorkspacePointers w(a.workspace, Workspace(a.shape, a.num_tokens));
  const auto holds = [&](const float* first, float value) {
    return std::all_of(first, first + a.shape.num_experts, [&](float x) { return x == value; });
  };
  if ((a.situ_beta == nullptr && !holds(w.situ_beta, kDefaultSituBeta)) ||
      (a.situ_linear_beta == nullptr && !holds(w.situ_linear_beta, kDefaultSituLinearBeta))) {
    return invalid_argument(
        names::kWorkspace,
        ": expected the SiTU constants that preparation wrote, got other bytes; prepare the buffer "
        "again, or pass situ_beta and situ_linear_beta when others write to it between calls");
  }
  return {};
}

// Calls run(chunk) for `a` in chunks of tokens, in order.
template <class Run>
Status for_each_chunk(const Arguments& a, const Run& run) {
  const int32_t most = tokens_per_chunk(a.num_tokens);
  for (int32_t first = 0; first < a.num_tokens; first += most) {
    const auto advance = [first](const void* base, int64_t token_bytes) {
      return static_cast<const uint8_t*>(base) + first * token_bytes;
    };
    Arguments chunk = a;
    chunk.num_tokens = std::min(most, a.num_tokens - first);
    chunk.input = advance(a.input, a.input_stride * 2);
    chunk.topk_ids =
        advance(a.topk_ids, a.shape.top_k * (a.topk_ids_type == IdType::kInt64 ? 8 : 4));
    chunk.topk_weights = advance(
        a.topk_weights, a.shape.top_k * (a.topk_weights_type == WeightType::kFloat32 ? 4 : 2));
    chunk.output = static_cast<uint8_t*>(a.output) + first * (a.shape.hidden * int64_t{2});
    CAKE_RETURN_IF_ERROR(run(chunk));
  }
  return {};
}

}  // namespace

Status cuda_support(int32_t major, int32_t minor) {
  if ((major == 9 && minor == 0) || (major == 10 && (minor == 0 || minor == 3))) {
    return {};
  }
  return error(StatusCode::kUnsupported,
               "device: expected a GPU of compute capability 9.0 (H100, H200), 10.0 (B200) or 10.3 "
               "(B300), or CPU tensors, got compute capability ",
               major, ".", minor);
}

Status prepare(const Shape& shape, void* workspace, int64_t bytes, int32_t num_tokens,
               Device device, void* stream) {
  return guarded([&]() -> Status {
    CAKE_RETURN_IF_ERROR(check_shape(shape));
    CAKE_RETURN_IF_ERROR(check_num_tokens(num_tokens));
    if (num_tokens == 0) {
      return {};
    }
    const nvtx::Range range("cake/prepare_workspace", num_tokens);
    CAKE_RETURN_IF_ERROR(check_workspace(shape, workspace, bytes, num_tokens, device));
    CAKE_RETURN_IF_ERROR(check_device(device, shape));
    if (device.type == DeviceType::kCuda) {
      const device::CurrentDevice guard(device.index);
      CAKE_RETURN_IF_ERROR(guard.status());
      CAKE_RETURN_IF_ERROR(device::prepare(workspace, num_tokens, stream));
    } else {
      const WorkspacePointers w(workspace, Workspace(shape, num_tokens));
      std::fill_n(w.situ_beta, shape.num_experts, kDefaultSituBeta);
      std::fill_n(w.situ_linear_beta, shape.num_experts, kDefaultSituLinearBeta);
    }
    prepared::add(shape, workspace, bytes, num_tokens, device);
    return {};
  });
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

Status run(const Arguments& arguments) {
  return guarded([&]() -> Status {
    Arguments a = arguments;
    CAKE_RETURN_IF_ERROR(check_shape(a.shape));
    CAKE_RETURN_IF_ERROR(check_num_tokens(a.num_tokens));
    if (a.num_tokens == 0) {
      return {};
    }
    const nvtx::Range range("cake/fused_moe", a.num_tokens);
    CAKE_RETURN_IF_ERROR(resolve_stride(a.shape.hidden, &a.input_stride));
    CAKE_RETURN_IF_ERROR(check_device(a.device, a.shape));
    CAKE_RETURN_IF_ERROR(
        check_workspace(a.shape, a.workspace, a.workspace_bytes, a.num_tokens, a.device));
    CAKE_RETURN_IF_ERROR(check_operands(a));
    CAKE_RETURN_IF_ERROR(
        check_prepared(a.shape, a.workspace, a.workspace_bytes, a.num_tokens, a.device));
    if (a.device.type == DeviceType::kCuda) {
      const device::CurrentDevice guard(a.device.index);
      CAKE_RETURN_IF_ERROR(guard.status());
      return for_each_chunk(a, [](const Arguments& chunk) { return device::fused_moe(chunk); });
    }
    CAKE_RETURN_IF_ERROR(check_constants(a));
    return for_each_chunk(a, [](const Arguments& chunk) {
      cpu::fused_moe(chunk);
      return Status{};
    });
  });
}

Status quantize_nvfp4(const QuantizeArguments& arguments) {
  return guarded([&]() -> Status {
    QuantizeArguments a = arguments;
    if (a.rows < 0 || a.columns < 0 || a.columns % kGroupSize != 0) {
      return invalid_argument("input: expected [rows, columns] with columns a multiple of ",
                              kGroupSize, ", got [", a.rows, ", ", a.columns, "]");
    }
    if (a.rows == 0 || a.columns == 0) {
      return {};
    }
    const nvtx::Range range("cake/quantize_nvfp4", a.rows);
    CAKE_RETURN_IF_ERROR(resolve_stride(a.columns, &a.input_stride));
    CAKE_RETURN_IF_ERROR(check_memory(
        std::array<Span, 2>{
            {{names::kInput, a.input, 2 * ((a.rows - 1) * a.input_stride + a.columns)},
             {"input_scale", a.input_scale, int64_t{sizeof(float)}}}},
        {{"packed", a.packed, a.rows * a.columns / 2},
         {"sf", a.sf, a.rows * a.columns / kGroupSize}}));
    if (a.device.type == DeviceType::kCpu) {
      cpu::quantize(a, a.executor != nullptr ? *a.executor : cpu::default_executor());
      return {};
    }
    const device::CurrentDevice guard(a.device.index);
    CAKE_RETURN_IF_ERROR(guard.status());
    return device::quantize(a);
  });
}

Status run_selftest(int32_t* out, int64_t count, Device device, void* stream) {
  return guarded([&]() -> Status {
    if (count < 0 || (count > 0 && out == nullptr)) {
      return invalid_argument("out: expected memory for at least 0 values, got ", out, " and ",
                              count);
    }
    if (device.type == DeviceType::kCpu) {
      for (int64_t i = 0; i < count; ++i) {
        out[i] = static_cast<int32_t>(i % 1000);
      }
      return {};
    }
    const device::CurrentDevice guard(device.index);
    CAKE_RETURN_IF_ERROR(guard.status());
    return count > 0 ? device::selftest(out, count, stream) : Status{};
  });
}

Status read_stream(const void* data, int64_t bytes, Device device, void* stream) {
  return guarded([&]() -> Status {
    if (device.type == DeviceType::kCpu) {
      return error(StatusCode::kUnsupported, "data: expected memory of a CUDA device");
    }
    if (bytes < 0 || data == nullptr || reinterpret_cast<uintptr_t>(data) % 16 != 0) {
      return invalid_argument("data: expected memory at a multiple of 16 bytes, got ", bytes,
                              " bytes at ", data);
    }
    const device::CurrentDevice guard(device.index);
    CAKE_RETURN_IF_ERROR(guard.status());
    return device::read_stream(data, bytes, device.index, stream);
  });
}

}  // namespace cake
