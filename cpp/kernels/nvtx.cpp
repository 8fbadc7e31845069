#include "nvtx.h"

#include <nvtx3/nvToolsExt.h>

#include <array>
#include <cstdio>

#include "environment.h"

namespace cake::nvtx {
namespace {

// Null where no tool listens.
nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t value =
      is_switched_on("CAKE_DISABLE_NVTX") ? nullptr : nvtxDomainCreateA("cake");
  return value;
}

void push(nvtxDomainHandle_t domain, const char* name) {
  nvtxEventAttributes_t event{};
  event.version = NVTX_VERSION;
  event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event.messageType = NVTX_MESSAGE_TYPE_ASCII;
  event.message.ascii = name;
  nvtxDomainRangePushEx(domain, &event);
}

}  // namespace

Range::Range(const char* name) {
  if (domain() != nullptr) {
    push(domain(), name);
  }
}

Range::Range(const char* name, int64_t num_tokens) {
  if (domain() != nullptr) {
    std::array<char, 64> text;
    std::snprintf(text.data(), text.size(), "%s T=%lld", name, static_cast<long long>(num_tokens));
    push(domain(), text.data());
  }
}

Range::~Range() {
  if (domain() != nullptr) {
    nvtxDomainRangePop(domain());
  }
}

}  // namespace cake::nvtx
