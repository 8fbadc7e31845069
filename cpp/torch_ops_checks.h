// Tensor checks of the operators. Each raises an error that names the argument, what was expected
// and what came: "[cake:<class>] message", which errors.py turns into the Python exception.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "cake/fused_moe.h"
#include "names.h"

namespace cake::torch_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

[[noreturn]] inline void raise(const char* python_class, const std::string& message) {
  throw std::runtime_error(std::string("[cake:") + python_class + "] " + message);
}

inline void raise_if_error(const cake::Status& status) {
  switch (status.code()) {
    case cake::StatusCode::kOk:
      return;
    case cake::StatusCode::kInvalidArgument:
      raise("ValueError", status.message());
    case cake::StatusCode::kInvalidType:
      raise("TypeError", status.message());
    case cake::StatusCode::kUnsupported:
      raise("Unsupported", status.message());
    case cake::StatusCode::kRuntimeError:
      raise("RuntimeError", status.message());
  }
}

template <class... Parts>
inline std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return std::move(stream).str();
}

inline std::string type_name(ScalarType type) {
  switch (type) {
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::UInt16:
      return "uint16";
    case ScalarType::UInt32:
      return "uint32";
    case ScalarType::UInt64:
      return "uint64";
    default:
      return text("torch scalar type ", static_cast<int>(type));
  }
}

inline cake::Device device_of(const Tensor& tensor) {
  return {tensor.is_cuda() ? cake::DeviceType::kCuda : cake::DeviceType::kCpu,
          tensor.is_cuda() ? tensor.get_device_index() : 0};
}

inline std::string device_name(cake::Device device) {
  return device.type == cake::DeviceType::kCpu ? "cpu" : text("cuda:", device.index);
}

template <class Sizes>
inline std::string sizes_text(const Sizes& sizes) {
  std::string out = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    out += (i != 0 ? ", " : "") + std::to_string(sizes.begin()[i]);
  }
  return out + "]";
}

inline void check_type(const char* name, const Tensor& tensor,
                       std::initializer_list<ScalarType> types) {
  std::string expected;
  for (ScalarType type : types) {
    if (tensor.scalar_type() == type) {
      return;
    }
    expected += (expected.empty() ? "" : " or ") + type_name(type);
  }
  raise("TypeError",
        text(name, ": expected ", expected, ", got ", type_name(tensor.scalar_type())));
}

inline void check_device(const char* name, const Tensor& tensor, cake::Device device) {
  if (device_of(tensor) != device) {
    raise("ValueError",
          text(name, ": expected a tensor on ", device_name(device),
               " like the first argument, got one on ", device_name(device_of(tensor))));
  }
}

inline void check_sizes(const char* name, const Tensor& tensor,
                        std::initializer_list<int64_t> sizes) {
  bool same = static_cast<size_t>(tensor.dim()) == sizes.size();
  for (size_t i = 0; same && i < sizes.size(); ++i) {
    same = tensor.size(static_cast<int64_t>(i)) == sizes.begin()[i];
  }
  if (!same) {
    raise("ValueError",
          text(name, ": expected shape ", sizes_text(sizes), ", got ", sizes_text(tensor.sizes())));
  }
}

inline void check_contiguous(const char* name, const Tensor& tensor) {
  if (!tensor.is_contiguous()) {
    const std::string_view operand = name;
    const bool is_written = operand == names::kOutput || operand == names::kWorkspace;
    raise("ValueError",
          text(name, ": expected a contiguous tensor, got strides ", sizes_text(tensor.strides()),
               " for shape ", sizes_text(tensor.sizes()),
               is_written ? "; pass a contiguous buffer" : "; call .contiguous()"));
  }
}

inline void check_operand(const char* name, const Tensor& tensor,
                          std::initializer_list<ScalarType> types,
                          std::initializer_list<int64_t> sizes, cake::Device device) {
  check_device(name, tensor, device);
  check_type(name, tensor, types);
  check_sizes(name, tensor, sizes);
  check_contiguous(name, tensor);
}

// A matrix of bf16 rows: any stride between rows, none within.
inline void check_rows(const char* name, const Tensor& tensor) {
  check_type(name, tensor, {ScalarType::BFloat16});
  if (tensor.dim() != 2) {
    raise("ValueError",
          text(name, ": expected 2 dimensions, got shape ", sizes_text(tensor.sizes())));
  }
  if (tensor.size(1) > 1 && tensor.stride(1) != 1) {
    raise("ValueError", text(name, ": expected a contiguous last dimension, got strides ",
                             sizes_text(tensor.strides()), "; call .contiguous()"));
  }
}

inline void check_workspace(const Tensor& workspace) {
  check_type(names::kWorkspace, workspace, {ScalarType::Byte, ScalarType::Char});
  if (workspace.dim() != 1) {
    raise("ValueError", text(names::kWorkspace, ": expected 1 dimension, got shape ",
                             sizes_text(workspace.sizes())));
  }
  check_contiguous(names::kWorkspace, workspace);
}

}  // namespace cake::torch_ops
