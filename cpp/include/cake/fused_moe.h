// The C++ interface of cake: the routed experts of Kimi-K3 in NVFP4, without torch and without
// Python. torch_ops.cpp is one user of it; a C++ server is another.
//
//   int64_t bytes = cake::workspace_bytes(cake::kKimiK3, max_num_tokens);
//   ... allocate `bytes` on the device, 128-byte aligned ...
//   cake::prepare(workspace, bytes, num_tokens, device, stream);   // once per token count
//   cake::run(arguments);                                          // any number of times
//   cake::release(workspace, device);                              // before the memory is freed
#pragma once

#include <cstdint>
#include <string>

#include "cake/status.h"

namespace cake {

// Geometry of one tensor-parallel rank. CUDA kernels exist for kKimiK3; the CPU path runs any
// geometry with `hidden` and `intermediate` multiples of 64 and `hidden`, 2 * `intermediate`
// multiples of 128 (whole 128x4 blocks of scales).
struct Shape {
  int32_t hidden;        // H
  int32_t intermediate;  // I, of this rank
  int32_t num_experts;   // E
  int32_t top_k;         // k

  friend bool operator==(const Shape&, const Shape&) = default;
};

inline constexpr Shape kKimiK3{3584, 384, 896, 16};
inline constexpr int32_t kMaxTokens = 16384;
inline constexpr int32_t kGroupSize = 16;            // elements of one block scale
inline constexpr int64_t kWorkspaceAlignment = 128;  // bytes on a GPU; 64 on the CPU
inline constexpr float kDefaultSituBeta = 4.0f;
inline constexpr float kDefaultSituLinearBeta = 25.0f;

enum class DeviceType : uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int32_t index = 0;

  friend bool operator==(const Device&, const Device&) = default;
};

enum class IdType : uint8_t { kInt32, kInt64 };
enum class WeightType : uint8_t { kBFloat16, kFloat32 };

// Runs `body(context, worker)` for worker 0 and any of 1 .. num_workers-1, possibly at the same
// time, and returns when all are done; each body takes work until none is left. The CPU path uses
// it for all its parallelism.
struct CpuExecutor {
  int32_t num_workers;
  void (*run)(int32_t num_workers, void (*body)(void* context, int32_t worker), void* context);
};

// One call. All pointers are on `device`; nothing is owned.
struct Arguments {
  Shape shape = kKimiK3;
  int32_t num_tokens = 0;  // T, 0 .. kMaxTokens
  Device device;
  void* stream = nullptr;                 // cudaStream_t; CUDA only
  const CpuExecutor* executor = nullptr;  // CPU only; nullptr: one thread per core
  // One arithmetic at every token count: a token's row has the same bits in every call. Without it
  // that holds among the token counts of a plan. Environment variable CAKE_BATCH_INVARIANT=1, read
  // once, does the same. The CPU has one arithmetic anyway.
  bool batch_invariant = false;

  const void* input = nullptr;     // bf16 [T, H], row stride below
  int64_t input_stride = -1;       // elements; -1: contiguous rows
  const void* topk_ids = nullptr;  // int32 or int64 [T, k]; ids outside [0, E) are empty slots
  IdType topk_ids_type = IdType::kInt32;
  const void* topk_weights = nullptr;  // bf16 or float32 [T, k]
  WeightType topk_weights_type = WeightType::kBFloat16;

  const void* w13 = nullptr;                // uint8 [E, 2I, H/2], prepared rows
  const void* w13_sf = nullptr;             // e4m3 [E, 2I, H/16], prepared rows, 128x4 interleaved
  const void* w2 = nullptr;                 // uint8 [E, H, I/2], prepared rows
  const void* w2_sf = nullptr;              // e4m3 [E, H, I/16], prepared rows, 128x4 interleaved
  const float* input_scale = nullptr;       // [1]  encoding scale of the input
  const float* fc1_alpha = nullptr;         // [E]  decoding factor of both FC1 halves
  const float* fc2_input_scale = nullptr;   // [E]  encoding scale of the intermediate
  const float* fc2_alpha = nullptr;         // [E]  decoding factor of FC2
  const float* situ_beta = nullptr;         // [E]  or nullptr: the workspace's prepared 4
  const float* situ_linear_beta = nullptr;  // [E]  or nullptr: the workspace's prepared 25

  void* output = nullptr;     // bf16 [T, H], contiguous; every element is written
  void* workspace = nullptr;  // prepared for num_tokens, aligned as above
  int64_t workspace_bytes = 0;
};

// Bytes of workspace for up to `max_num_tokens` tokens; host arithmetic only. Non-decreasing in
// the token count. -1 for a token count outside 0 .. kMaxTokens or a shape that is not supported.
int64_t workspace_bytes(const Shape& shape, int32_t max_num_tokens);

// What lies where in it: a JSON list of {"region", "offset", "bytes"}, in order of offset.
std::string workspace_table(const Shape& shape, int32_t num_tokens);

// How a GPU of compute capability `major`.x with `num_sms` multiprocessors runs a call with
// `num_tokens` tokens (at least 1) of kKimiK3: a JSON object of kernels, pairs per tile, tokens per
// chunk, parts of the output columns, the pool of FC2's work (one block in `fc2_pool_part` is
// claimed, `fc2_pool_rows` rows at a time; both 0: there is no pool), and whether FC2 finalizes in
// the same launch.
std::string plan_text(int32_t num_tokens, bool batch_invariant = false, int32_t major = 9,
                      int32_t num_sms = 132);

// Makes `workspace` ready for calls with exactly `num_tokens` tokens: writes the default SiTU
// constants on `stream`, loads the kernels and remembers address and size. Idempotent. Allocates
// nothing on the device. Refused during stream capture.
Status prepare(const Shape& shape, void* workspace, int64_t bytes, int32_t num_tokens,
               Device device, void* stream);

// Whether `workspace` (address, size and device) is prepared for `num_tokens` tokens.
Status check_prepared(const Shape& shape, const void* workspace, int64_t bytes, int32_t num_tokens,
                      Device device);

// Forgets a prepared workspace. Call it before the memory is freed, so that another buffer at the
// same address does not count as prepared.
void release(const void* workspace, Device device);

// Runs the whole operation. Allocates nothing, does not synchronize, reads no routing value on the
// host of a GPU. Errors come before any write or launch.
Status run(const Arguments& arguments);

// Quantizes rows to NVFP4 (recipe P): bf16 [rows, columns] with `input_stride` elements between
// rows -> packed uint8 [rows, columns/2] and linear e4m3 scales [rows, columns/16].
// `columns` must be a multiple of 16; `input_scale` is one float on the device.
struct QuantizeArguments {
  const void* input = nullptr;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t input_stride = -1;  // elements; -1: contiguous rows
  const float* input_scale = nullptr;
  void* packed = nullptr;
  void* sf = nullptr;
  Device device;
  void* stream = nullptr;
  const CpuExecutor* executor = nullptr;
};
Status quantize_nvfp4(const QuantizeArguments& arguments);

// Fills `out` with a pattern that names the code that ran: out[i] = 1000 * arch + i % 1000, where
// arch is 0 on the CPU and the compute capability (90, 100, 103) of the cubin on a GPU.
Status run_selftest(int32_t* out, int64_t count, Device device, void* stream);

// Reads device memory, whole chunks of 16384 bytes of `bytes`, at the rate that the GPU can, and
// drops it; for measuring that rate. `data` is aligned to 16 bytes. CUDA only.
Status read_stream(const void* data, int64_t bytes, Device device, void* stream);

// Whether a device of compute capability `major`.`minor` can execute `run` in this build.
Status cuda_support(int32_t major, int32_t minor);

// JSON object: version, commit, compilers, architectures, what is built in. Static storage.
const char* build_info();

}  // namespace cake
