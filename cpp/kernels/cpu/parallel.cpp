#include "cpu/parallel.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

namespace cake::cpu {
namespace {

void run_on_threads(int32_t num_workers, void (*body)(void*, int32_t), void* context) {
  std::vector<std::jthread> threads;
  threads.reserve(static_cast<size_t>(num_workers) - 1);
  try {
    for (int32_t worker = 1; worker < num_workers; ++worker) {
      threads.emplace_back(body, context, worker);
    }
  } catch (const std::system_error&) {
    // No more threads to be had: those that run, and this one, do all the work.
  }
  body(context, 0);
}

}  // namespace

const CpuExecutor& default_executor() {
  static const CpuExecutor executor{
      std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency())), &run_on_threads};
  return executor;
}

}  // namespace cake::cpu
