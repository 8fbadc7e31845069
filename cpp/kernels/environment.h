// Environment variables that switch something on; all are in docs/observability.md.
#pragma once

#include <cstdlib>
#include <string_view>

namespace cake {

// Whether the variable is 1. Callers keep the answer: it is read once.
inline bool is_switched_on(const char* variable) {
  const char* text = std::getenv(variable);
  return text != nullptr && std::string_view(text) == "1";
}

}  // namespace cake
