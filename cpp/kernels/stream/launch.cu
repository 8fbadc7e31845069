#include "kernel_launch.h"
#include "stream/kernel.cuh"
#include "stream/launch.h"

namespace cake::stream {

Status launch_read_stream(const void* data, int64_t bytes, int32_t num_sms, void* stream) {
  CAKE_RETURN_IF_ERROR(load_kernel("cake_read_stream", &cake_read_stream, sizeof(Storage)));
  LaunchConfig where;
  where.grid = dim3(static_cast<unsigned>(num_sms));
  where.block = dim3(32);
  where.shared_bytes = sizeof(Storage);
  where.stream = static_cast<cudaStream_t>(stream);
  return launch("cake_read_stream", where, &cake_read_stream, static_cast<const uint8_t*>(data),
                bytes / kChunkBytes);
}

}  // namespace cake::stream
