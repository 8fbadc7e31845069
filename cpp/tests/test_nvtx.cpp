// The ranges that a profiler sees, with a profiler of our own linked in.
#include <gtest/gtest.h>
#include <nvtx3/nvToolsExt.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "nvtx.h"
#include "tiny_layer.h"

namespace {

std::vector<std::string>& events() {
  static std::vector<std::string> list;
  return list;
}

nvtxDomainHandle_t create_domain(const char* name) {
  events().push_back(std::string("domain ") + name);
  static int domain;
  return reinterpret_cast<nvtxDomainHandle_t>(&domain);
}

int push(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) {
  events().push_back(event->message.ascii);
  return 0;
}

int pop(nvtxDomainHandle_t) {
  events().push_back("end");
  return 0;
}

int attach(NvtxGetExportTableFunc_t get_export_table) {
  const auto* callbacks =
      static_cast<const NvtxExportTableCallbacks*>(get_export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0) {
    return 0;
  }
  *table[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(&create_domain);
  *table[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(&push);
  *table[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(&pop);
  return 1;
}

}  // namespace

namespace cake {
namespace {

// One call of the tiny operation, and one that is refused.
void call() {
  const testing::Operands operands = testing::golden_operands();
  Arguments a = operands.arguments();
  alignas(kWorkspaceAlignment) static uint8_t workspace[1 << 20];
  std::vector<uint16_t> output(static_cast<size_t>(a.num_tokens) * a.shape.hidden);
  a.output = output.data();
  a.workspace = workspace;
  a.workspace_bytes = sizeof(workspace);
  ASSERT_TRUE(prepare(a.shape, workspace, sizeof(workspace), a.num_tokens, a.device, nullptr).ok());
  ASSERT_TRUE(run(a).ok());
  a.workspace = nullptr;
  ASSERT_FALSE(run(a).ok());
  release(workspace, a.device);
}

// ctest runs this program twice, the second time with CAKE_DISABLE_NVTX=1.
TEST(Nvtx, ACallAndItsStagesAreNestedRanges) {
  InitializeInjectionNvtx2_fnptr = &attach;  // what the first range asks for a profiler
  call();
  const char* disabled = std::getenv("CAKE_DISABLE_NVTX");
  if (disabled != nullptr && std::string_view(disabled) == "1") {
    EXPECT_EQ(events(), std::vector<std::string>{});
    return;
  }
  const std::vector<std::string> expected{"domain cake",
                                          "cake/prepare_workspace T=5",
                                          "end",
                                          "cake/fused_moe T=5",
                                          "cake/quantize",
                                          "end",
                                          "cake/route",
                                          "end",
                                          "cake/fc1",
                                          "end",
                                          "cake/fc2",
                                          "end",
                                          "cake/finalize",
                                          "end",
                                          "end",
                                          "cake/fused_moe T=5",
                                          "end"};
  EXPECT_EQ(events(), expected);
}

}  // namespace
}  // namespace cake
