// Named memory of a call, to find missing and overlapping operands.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "message.h"

namespace cake {

struct Span {
  const char* name;
  const void* data;
  int64_t bytes;

  bool overlaps(const Span& other) const {
    const auto a = reinterpret_cast<uintptr_t>(data);
    const auto b = reinterpret_cast<uintptr_t>(other.data);
    return bytes > 0 && other.bytes > 0 && a < b + static_cast<uintptr_t>(other.bytes) &&
           b < a + static_cast<uintptr_t>(bytes);
  }
};

// Everything that is read is there, and nothing that is written overlaps anything else.
template <class Reads>
Status check_memory(const Reads& reads, std::initializer_list<Span> writes) {
  for (const Span& read : reads) {
    if (read.bytes > 0 && read.data == nullptr) {
      return invalid_argument(read.name, ": expected data, got a null pointer");
    }
  }
  for (const Span& write : writes) {
    if (write.bytes > 0 && write.data == nullptr) {
      return invalid_argument(write.name, ": expected data, got a null pointer");
    }
    const auto check = [&](const Span& other) -> Status {
      if (&other != &write && write.overlaps(other)) {
        return invalid_argument(
            write.name, ": expected memory of its own, got memory that overlaps ", other.name);
      }
      return {};
    };
    for (const Span& read : reads) {
      CAKE_RETURN_IF_ERROR(check(read));
    }
    for (const Span& other : writes) {
      CAKE_RETURN_IF_ERROR(check(other));
    }
  }
  return {};
}

}  // namespace cake
