// Result of every host function of cake: a code and a message that a user can act on.
#pragma once

#include <string>
#include <utility>

namespace cake {

enum class StatusCode {
  kOk,
  kInvalidArgument,  // wrong value, shape, stride, size or alignment
  kInvalidType,      // wrong dtype
  kUnsupported,      // valid, but this build or this device cannot do it
  kRuntimeError,     // a CUDA call failed, or the call came at a forbidden moment
};

// No exception crosses the public interface; success allocates nothing.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

}  // namespace cake

// Returns from the calling function when `expression` is not ok.
#define CAKE_RETURN_IF_ERROR(expression)                        \
  do {                                                          \
    if (::cake::Status status_ = (expression); !status_.ok()) { \
      return status_;                                           \
    }                                                           \
  } while (false)
