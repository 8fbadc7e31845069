// The C++ interface without torch: one call on the CPU, on a small layer of random prepared
// weights.
//
//   cmake -S . -B build/cpp -DCAKE_TESTS=ON && cmake --build build/cpp --target cake_example
//
// That takes CMake 3.28 or newer (pip install cmake), a Python for the configuration, and
// GoogleTest (Debian's libgtest-dev), no torch. A program of its own links cake::core after `cmake
// --install build/cpp --component cpp` and find_package(cake). On a GPU: pointers to device memory,
// a Device of type kCuda, the stream, and cake::kKimiK3 as the shape.
#include <cake/fused_moe.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

namespace {

template <class T, class Make>
std::vector<T> make(size_t count, const Make& value) {
  std::vector<T> out(count);
  for (T& element : out) {
    element = value();
  }
  return out;
}

int fail(const cake::Status& status) {
  std::fprintf(stderr, "%s\n", status.message().c_str());
  return EXIT_FAILURE;
}

}  // namespace

int main() {
  constexpr cake::Shape shape{.hidden = 256, .intermediate = 128, .num_experts = 8, .top_k = 2};
  constexpr int32_t num_tokens = 3;
  constexpr size_t h = shape.hidden, i = shape.intermediate, e = shape.num_experts;
  constexpr size_t pairs = num_tokens * shape.top_k;

  std::mt19937 rng(0);
  const auto codes = [&] { return static_cast<uint8_t>(rng()); };
  const auto scale = [&] { return static_cast<uint8_t>(0x20 + rng() % 16); };  // E4M3, about 2^-3
  const auto input = make<uint16_t>(num_tokens * h, [&] {  // bfloat16 of magnitude 1 to 2
    return static_cast<uint16_t>(0x3F80 | (rng() & 0x807F));
  });
  const auto topk_ids = make<int32_t>(pairs, [&] { return static_cast<int32_t>(rng() % e); });
  const std::vector<uint16_t> topk_weights(pairs, 0x3F00);  // 0.5
  const auto w13 = make<uint8_t>(e * 2 * i * h / 2, codes);
  const auto w13_sf = make<uint8_t>(e * 2 * i * h / 16, scale);
  const auto w2 = make<uint8_t>(e * h * i / 2, codes);
  const auto w2_sf = make<uint8_t>(e * h * i / 16, scale);
  const std::vector<float> input_scale{1.0f}, ones(e, 1.0f);
  std::vector<uint16_t> output(num_tokens * h);

  const int64_t bytes = cake::workspace_bytes(shape, num_tokens);
  const std::unique_ptr<void, decltype(&std::free)> workspace(
      std::aligned_alloc(cake::kWorkspaceAlignment, static_cast<size_t>(bytes)), &std::free);
  const cake::Device device{cake::DeviceType::kCpu, 0};
  if (const auto status = cake::prepare(shape, workspace.get(), bytes, num_tokens, device, nullptr);
      !status.ok()) {
    return fail(status);
  }
  cake::Arguments arguments;
  arguments.shape = shape;
  arguments.num_tokens = num_tokens;
  arguments.device = device;
  arguments.input = input.data();
  arguments.topk_ids = topk_ids.data();
  arguments.topk_weights = topk_weights.data();
  arguments.w13 = w13.data();
  arguments.w13_sf = w13_sf.data();
  arguments.w2 = w2.data();
  arguments.w2_sf = w2_sf.data();
  arguments.input_scale = input_scale.data();
  arguments.fc1_alpha = ones.data();
  arguments.fc2_input_scale = ones.data();
  arguments.fc2_alpha = ones.data();
  arguments.output = output.data();
  arguments.workspace = workspace.get();
  arguments.workspace_bytes = bytes;
  if (const auto status = cake::run(arguments); !status.ok()) {
    return fail(status);
  }
  cake::release(workspace.get(), device);

  size_t nonzero = 0;
  for (const uint16_t value : output) {
    nonzero += (value & 0x7FFF) != 0;
  }
  std::printf("%zu of %zu outputs are not zero; build: %s\n", nonzero, output.size(),
              cake::build_info());
  return nonzero > output.size() / 2 ? EXIT_SUCCESS : EXIT_FAILURE;
}
