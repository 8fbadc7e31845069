// The operators torch.ops.cake.*, on LibTorch's stable ABI: check the tensors, take device and
// stream, call the functions of cake/fused_moe.h. Only the files named torch_ops* know torch.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "cake/fused_moe.h"
#include "torch_ops_checks.h"
#include "torch_ops_runtime.h"

namespace cake::torch_ops {
namespace {

void fused_moe(const Tensor& input, const Tensor& topk_ids, const Tensor& topk_weights,
               const Tensor& w13, const Tensor& w2, const Tensor& input_scale, const Tensor& w13_sf,
               const Tensor& fc1_alpha, const Tensor& fc2_input_scale, const Tensor& w2_sf,
               const Tensor& fc2_alpha, const std::optional<Tensor>& situ_beta,
               const std::optional<Tensor>& situ_linear_beta, const Tensor& output,
               const Tensor& workspace, bool batch_invariant) {
  constexpr cake::Shape shape = cake::kKimiK3;
  constexpr int64_t h = shape.hidden;
  constexpr int64_t i = shape.intermediate;
  constexpr int64_t e = shape.num_experts;
  constexpr int64_t group = cake::kGroupSize;
  static constexpr std::initializer_list<ScalarType> kFloat = {ScalarType::Float};
  static constexpr std::initializer_list<ScalarType> kCodes = {ScalarType::Byte};
  static constexpr std::initializer_list<ScalarType> kScales = {ScalarType::Byte,
                                                                ScalarType::Float8_e4m3fn};

  const cake::Device device = device_of(input);
  check_rows(names::kInput, input);
  const int64_t tokens = input.size(0);
  if (tokens > cake::kMaxTokens || input.size(1) != h) {
    raise("ValueError", text(names::kInput, ": expected shape [T, ", h, "] with T from 0 to ",
                             cake::kMaxTokens, ", got ", sizes_text(input.sizes())));
  }
  check_operand(names::kTopkIds, topk_ids, {ScalarType::Int, ScalarType::Long},
                {tokens, shape.top_k}, device);
  check_operand(names::kTopkWeights, topk_weights, {ScalarType::BFloat16, ScalarType::Float},
                {tokens, shape.top_k}, device);
  check_operand(names::kW13, w13, kCodes, {e, 2 * i, h / 2}, device);
  check_operand(names::kW2, w2, kCodes, {e, h, i / 2}, device);
  check_device(names::kInputScale, input_scale, device);
  check_type(names::kInputScale, input_scale, kFloat);
  if (input_scale.numel() != 1) {
    raise("ValueError", text(names::kInputScale, ": expected 1 element, got shape ",
                             sizes_text(input_scale.sizes())));
  }
  check_operand(names::kW13Sf, w13_sf, kScales, {e, 2 * i, h / group}, device);
  check_operand(names::kFc1Alpha, fc1_alpha, kFloat, {e}, device);
  check_operand(names::kFc2InputScale, fc2_input_scale, kFloat, {e}, device);
  check_operand(names::kW2Sf, w2_sf, kScales, {e, h, i / group}, device);
  check_operand(names::kFc2Alpha, fc2_alpha, kFloat, {e}, device);
  if (situ_beta) {
    check_operand(names::kSituBeta, *situ_beta, kFloat, {e}, device);
  }
  if (situ_linear_beta) {
    check_operand(names::kSituLinearBeta, *situ_linear_beta, kFloat, {e}, device);
  }
  check_operand(names::kOutput, output, {ScalarType::BFloat16}, {tokens, h}, device);
  check_device(names::kWorkspace, workspace, device);
  check_workspace(workspace);

  const auto floats = [](const Tensor& tensor) {
    return static_cast<const float*>(tensor.const_data_ptr());
  };
  const cake::CpuExecutor executor = torch_executor();
  cake::Arguments arguments;
  arguments.num_tokens = static_cast<int32_t>(tokens);
  arguments.device = device;
  arguments.stream = current_stream(device);
  arguments.executor = &executor;
  arguments.batch_invariant = batch_invariant;
  arguments.input = input.const_data_ptr();
  arguments.input_stride = input.stride(0);
  arguments.topk_ids = topk_ids.const_data_ptr();
  arguments.topk_ids_type =
      topk_ids.scalar_type() == ScalarType::Long ? cake::IdType::kInt64 : cake::IdType::kInt32;
  arguments.topk_weights = topk_weights.const_data_ptr();
  arguments.topk_weights_type = topk_weights.scalar_type() == ScalarType::Float
                                    ? cake::WeightType::kFloat32
                                    : cake::WeightType::kBFloat16;
  arguments.w13 = w13.const_data_ptr();
  arguments.w13_sf = w13_sf.const_data_ptr();
  arguments.w2 = w2.const_data_ptr();
  arguments.w2_sf = w2_sf.const_data_ptr();
  arguments.input_scale = floats(input_scale);
  arguments.fc1_alpha = floats(fc1_alpha);
  arguments.fc2_input_scale = floats(fc2_input_scale);
  arguments.fc2_alpha = floats(fc2_alpha);
  arguments.situ_beta = situ_beta ? floats(*situ_beta) : nullptr;
  arguments.situ_linear_beta = situ_linear_beta ? floats(*situ_linear_beta) : nullptr;
  arguments.output = output.mutable_data_ptr();
  arguments.workspace = workspace.mutable_data_ptr();
  arguments.workspace_bytes = workspace.numel();
  raise_if_error(cake::run(arguments));
}

void quantize_nvfp4(const Tensor& input, const Tensor& input_scale, const Tensor& packed,
                    const Tensor& sf) {
  const cake::Device device = device_of(input);
  check_rows(names::kInput, input);
  const int64_t rows = input.size(0);
  const int64_t columns = input.size(1);
  check_device("input_scale", input_scale, device);
  check_type("input_scale", input_scale, {ScalarType::Float});
  if (input_scale.numel() != 1) {
    raise("ValueError",
          text("input_scale: expected 1 element, got shape ", sizes_text(input_scale.sizes())));
  }
  check_operand("packed", packed, {ScalarType::Byte}, {rows, columns / 2}, device);
  check_operand("sf", sf, {ScalarType::Byte, ScalarType::Float8_e4m3fn},
                {rows, columns / cake::kGroupSize}, device);
  const cake::CpuExecutor executor = torch_executor();
  cake::QuantizeArguments arguments;
  arguments.input = input.const_data_ptr();
  arguments.rows = rows;
  arguments.columns = columns;
  arguments.input_stride = input.stride(0);
  arguments.input_scale = static_cast<const float*>(input_scale.const_data_ptr());
  arguments.packed = packed.mutable_data_ptr();
  arguments.sf = sf.mutable_data_ptr();
  arguments.device = device;
  arguments.stream = current_stream(device);
  arguments.executor = &executor;
  raise_if_error(cake::quantize_nvfp4(arguments));
}

int32_t token_count(int64_t num_tokens) {
  if (num_tokens < 0 || num_tokens > cake::kMaxTokens) {
    raise("ValueError", text("num_tokens: expected 0 to ", cake::kMaxTokens, ", got ", num_tokens));
  }
  return static_cast<int32_t>(num_tokens);
}

int64_t workspace_size(int64_t max_num_tokens) {
  return cake::workspace_bytes(cake::kKimiK3, token_count(max_num_tokens));
}

std::string workspace_table(int64_t num_tokens) {
  return cake::workspace_table(cake::kKimiK3, token_count(num_tokens));
}

std::string plan(int64_t num_tokens, bool batch_invariant, int64_t major, int64_t num_sms) {
  if (num_tokens < 1) {
    raise("ValueError", text("num_tokens: expected 1 to ", cake::kMaxTokens, ", got ", num_tokens));
  }
  if (num_sms < 1 || num_sms > std::numeric_limits<int32_t>::max()) {
    raise("ValueError", text("num_sms: expected a number of multiprocessors, got ", num_sms));
  }
  return cake::plan_text(token_count(num_tokens), batch_invariant, static_cast<int32_t>(major),
                         static_cast<int32_t>(num_sms));
}

void prepare_workspace(const Tensor& workspace, std::vector<int64_t> num_tokens) {
  check_workspace(workspace);
  const cake::Device device = device_of(workspace);
  for (const int64_t count : num_tokens) {
    raise_if_error(cake::prepare(cake::kKimiK3, workspace.mutable_data_ptr(), workspace.numel(),
                                 token_count(count), device, current_stream(device)));
  }
}

// device_index: -1 for the CPU.
void release_workspace(int64_t address, int64_t device_index) {
  const cake::Device device{device_index < 0 ? cake::DeviceType::kCpu : cake::DeviceType::kCuda,
                            device_index < 0 ? 0 : static_cast<int32_t>(device_index)};
  cake::release(reinterpret_cast<const void*>(address), device);
}

void selftest(const Tensor& out) {
  check_type("out", out, {ScalarType::Int});
  check_contiguous("out", out);
  if (out.numel() > 0) {
    raise_if_error(cake::run_selftest(static_cast<int32_t*>(out.mutable_data_ptr()), out.numel(),
                                      device_of(out), current_stream(device_of(out))));
  }
}

void read_stream(const Tensor& data) {
  check_contiguous("data", data);
  const int64_t bytes = data.numel() * static_cast<int64_t>(data.element_size());
  if (bytes > 0) {
    raise_if_error(cake::read_stream(data.const_data_ptr(), bytes, device_of(data),
                                     current_stream(device_of(data))));
  }
}

// Empty when a GPU of this compute capability is supported, else the reason.
std::string cuda_support(int64_t major, int64_t minor) {
  return cake::cuda_support(static_cast<int32_t>(major), static_cast<int32_t>(minor)).message();
}

std::string build_info() { return cake::build_info(); }

STABLE_TORCH_LIBRARY(cake, m) {
  // The whole routed-SiTU operation of one TP8 rank; writes `output`, uses `workspace` as scratch.
  m.def(
      "fused_moe(Tensor input, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w2, "
      "Tensor input_scale, Tensor w13_sf, Tensor fc1_alpha, Tensor fc2_input_scale, Tensor w2_sf, "
      "Tensor fc2_alpha, Tensor? situ_beta, Tensor? situ_linear_beta, Tensor(a!) output, "
      "Tensor(b!) workspace, bool batch_invariant=False) -> ()");
  // BF16 rows to NVFP4 codes and linear block scales, recipe P.
  m.def("quantize_nvfp4(Tensor input, Tensor input_scale, Tensor(a!) packed, Tensor(b!) sf) -> ()");
  m.def("workspace_size(int max_num_tokens) -> int");
  // JSON list of the workspace's regions: name, offset, bytes.
  m.def("workspace_table(int num_tokens) -> str");
  // JSON object: how a GPU of compute capability `major`.x runs a call with so many tokens.
  m.def("plan(int num_tokens, bool batch_invariant=False, int major=9, int num_sms=132) -> str");
  m.def("prepare_workspace(Tensor(a!) workspace, int[] num_tokens) -> ()");
  m.def("release_workspace(int address, int device_index) -> ()");
  // Fills `out` with 1000 * compute capability of the code that ran + index % 1000.
  m.def("selftest(Tensor(a!) out) -> ()");
  // Reads a tensor's memory at the rate that the GPU can, and drops it.
  m.def("read_stream(Tensor data) -> ()");
  m.def("cuda_support(int major, int minor) -> str");
  m.def("build_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(cake, CPU, m) {
  m.impl("fused_moe", TORCH_BOX(&fused_moe));
  m.impl("quantize_nvfp4", TORCH_BOX(&quantize_nvfp4));
  m.impl("prepare_workspace", TORCH_BOX(&prepare_workspace));
  m.impl("selftest", TORCH_BOX(&selftest));
  m.impl("read_stream", TORCH_BOX(&read_stream));
}

STABLE_TORCH_LIBRARY_IMPL(cake, CUDA, m) {
  m.impl("fused_moe", TORCH_BOX(&fused_moe));
  m.impl("quantize_nvfp4", TORCH_BOX(&quantize_nvfp4));
  m.impl("prepare_workspace", TORCH_BOX(&prepare_workspace));
  m.impl("selftest", TORCH_BOX(&selftest));
  m.impl("read_stream", TORCH_BOX(&read_stream));
}

STABLE_TORCH_LIBRARY_IMPL(cake, CompositeExplicitAutograd, m) {
  m.impl("workspace_size", TORCH_BOX(&workspace_size));
  m.impl("workspace_table", TORCH_BOX(&workspace_table));
  m.impl("plan", TORCH_BOX(&plan));
  m.impl("release_workspace", TORCH_BOX(&release_workspace));
  m.impl("cuda_support", TORCH_BOX(&cuda_support));
  m.impl("build_info", TORCH_BOX(&build_info));
}

}  // namespace
}  // namespace cake::torch_ops
