#include "workspace.h"

#include <algorithm>
#include <sstream>

namespace cake {

Workspace::Workspace(const Shape& shape, int32_t num_tokens) {
  const int64_t tokens = std::min(num_tokens, kChunkTokens);
  const int64_t pairs = tokens * shape.top_k;
  const auto place = [this](Region& region, const char* name, int64_t bytes) {
    region = {name, total_bytes, bytes};
    total_bytes += (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  };
  place(situ_beta, "situ_beta", shape.num_experts * int64_t{sizeof(float)});
  place(situ_linear_beta, "situ_linear_beta", shape.num_experts * int64_t{sizeof(float)});
  place(input_packed, "input_packed", tokens * shape.hidden / 2);
  place(input_sf, "input_sf", tokens * shape.hidden / kGroupSize);
  place(expert_offsets, "expert_offsets", (shape.num_experts + 1) * int64_t{sizeof(int32_t)});
  place(expert_pairs, "expert_pairs", pairs * int64_t{sizeof(int32_t)});
  place(tiles, "tiles",
        std::min(pairs, pairs / kSmallestTilePairs + shape.num_experts) * int64_t{sizeof(Tile)});
  place(num_tiles, "num_tiles", int64_t{sizeof(int32_t)});
  place(range_counters, "range_counters", int64_t{sizeof(RangeCounters)});
  place(fc1_packed, "fc1_packed", pairs * shape.intermediate / 2);
  place(fc1_sf, "fc1_sf", pairs * shape.intermediate / kGroupSize);
  const int64_t all_rows = pairs * shape.hidden * int64_t{sizeof(uint16_t)};
  place(fc2_rows, "fc2_rows", std::min(all_rows, kFc2RowsBytes));
  place(work_counter, "work_counter", is_pooled(num_tokens) ? int64_t{sizeof(int32_t)} : 0);
}

WorkspacePointers::WorkspacePointers(void* base, const Workspace& layout) {
  const auto set = [base]<class T>(T*& pointer, const Region& region) {
    pointer =
        region.bytes > 0 ? reinterpret_cast<T*>(static_cast<char*>(base) + region.offset) : nullptr;
  };
  set(situ_beta, layout.situ_beta);
  set(situ_linear_beta, layout.situ_linear_beta);
  set(input_packed, layout.input_packed);
  set(input_sf, layout.input_sf);
  set(expert_offsets, layout.expert_offsets);
  set(expert_pairs, layout.expert_pairs);
  set(tiles, layout.tiles);
  set(num_tiles, layout.num_tiles);
  set(range_counters, layout.range_counters);
  set(fc1_packed, layout.fc1_packed);
  set(fc1_sf, layout.fc1_sf);
  set(fc2_rows, layout.fc2_rows);
  set(work_counter, layout.work_counter);
}

int64_t workspace_bytes(const Shape& shape, int32_t max_num_tokens) {
  const bool valid = max_num_tokens >= 0 && max_num_tokens <= kMaxTokens && is_supported(shape);
  return valid ? Workspace(shape, max_num_tokens).total_bytes : -1;
}

std::string workspace_table(const Shape& shape, int32_t num_tokens) {
  const Workspace layout(shape, num_tokens);
  std::ostringstream json;
  for (const Region* region : layout.regions()) {
    json << (region == layout.regions().front() ? "[" : ", ") << R"({"region": ")" << region->name
         << R"(", "offset": )" << region->offset << R"(, "bytes": )" << region->bytes << "}";
  }
  json << "]";
  return std::move(json).str();
}

}  // namespace cake
