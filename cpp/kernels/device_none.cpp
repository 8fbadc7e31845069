// device.h for a build without CUDA (-DCAKE_CUDA=OFF).
#include "device.h"
#include "message.h"

namespace cake::device {
namespace {

Status no_cuda() {
  return error(StatusCode::kUnsupported,
               "device: this build of cake has no CUDA code (CAKE_CUDA=OFF); use CPU tensors or "
               "install a build with CUDA");
}

}  // namespace

CurrentDevice::CurrentDevice(int32_t) : status_(no_cuda()) {}
CurrentDevice::~CurrentDevice() = default;
Status compute_capability(int32_t, int32_t*, int32_t*) { return no_cuda(); }
Status quantize(const QuantizeArguments&) { return no_cuda(); }
Status fused_moe(const Arguments&) { return no_cuda(); }
Status prepare(void*, int32_t, void*) { return no_cuda(); }
Status selftest(int32_t*, int64_t, void*) { return no_cuda(); }
Status read_stream(const void*, int64_t, int32_t, void*) { return no_cuda(); }

}  // namespace cake::device
