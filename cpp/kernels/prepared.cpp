#include "prepared.h"

#include <bitset>
#include <map>
#include <mutex>
#include <tuple>

namespace cake::prepared {
namespace {

// Two views of different length at one address are two workspaces: each is prepared by itself.
struct Key {
  const void* workspace;
  DeviceType type;
  int32_t index;
  int64_t bytes;
  Shape shape;

  auto fields() const {
    return std::tie(workspace, type, index, bytes, shape.hidden, shape.intermediate,
                    shape.num_experts, shape.top_k);
  }
  friend bool operator<(const Key& a, const Key& b) { return a.fields() < b.fields(); }
};

using TokenCounts = std::bitset<kMaxTokens + 1>;

std::mutex mutex;
std::map<Key, TokenCounts>& table() {
  // Never destroyed: a buffer may be released while the process exits.
  static auto* instance = new std::map<Key, TokenCounts>;
  return *instance;
}

}  // namespace

void add(const Shape& shape, const void* workspace, int64_t bytes, int32_t num_tokens,
         Device device) {
  const std::lock_guard lock(mutex);
  table()[{workspace, device.type, device.index, bytes, shape}].set(num_tokens);
}

bool contains(const Shape& shape, const void* workspace, int64_t bytes, int32_t num_tokens,
              Device device) {
  const std::lock_guard lock(mutex);
  const auto found = table().find({workspace, device.type, device.index, bytes, shape});
  return found != table().end() && found->second.test(num_tokens);
}

void remove(const void* workspace, Device device) {
  const std::lock_guard lock(mutex);
  auto entry = table().lower_bound({workspace, device.type, device.index, 0, Shape{}});
  while (entry != table().end() && entry->first.workspace == workspace &&
         entry->first.type == device.type && entry->first.index == device.index) {
    entry = table().erase(entry);
  }
}

}  // namespace cake::prepared
