// device.h on top of the CUDA runtime (linked statically; no driver library is linked).
#include <cuda_runtime.h>

#include "device.h"
#include "kernel_launch.h"
#include "quantize/launch.h"
#include "selftest/launch.h"
#include "stream/launch.h"

namespace cake::device {

CurrentDevice::CurrentDevice(int32_t index) {
  int current = 0;
  status_ = cuda_status(cudaGetDevice(&current), "cudaGetDevice");
  if (status_.ok() && current != index) {
    status_ = cuda_status(cudaSetDevice(index), "cudaSetDevice");
    former_ = current;
  }
}

CurrentDevice::~CurrentDevice() {
  if (former_ >= 0) {
    cudaSetDevice(former_);
  }
}

Status compute_capability(int32_t index, int32_t* major, int32_t* minor) {
  CAKE_RETURN_IF_ERROR(
      cuda_status(cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, index),
                  "cudaDeviceGetAttribute"));
  return cuda_status(cudaDeviceGetAttribute(minor, cudaDevAttrComputeCapabilityMinor, index),
                     "cudaDeviceGetAttribute");
}

Status multiprocessor_count(int32_t index, int32_t* count) {
  return cuda_status(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, index),
                     "cudaDeviceGetAttribute");
}

Status quantize(const QuantizeArguments& arguments) {
  return cake::quantize::launch_quantize(arguments);
}

Status selftest(int32_t* out, int64_t count, void* stream) {
  return cake::selftest::launch_selftest(out, count, stream);
}

Status read_stream(const void* data, int64_t bytes, int32_t index, void* stream) {
  int32_t num_sms = 0;
  CAKE_RETURN_IF_ERROR(multiprocessor_count(index, &num_sms));
  return cake::stream::launch_read_stream(data, bytes, num_sms, stream);
}

}  // namespace cake::device
