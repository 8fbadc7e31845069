#include "workspace.h"

#include <algorithm>
#include <sstream>

#include "common/tile.h"

namespace cake {

Workspace::Workspace(const Shape& shape, int32_t num_tokens) {
  const int64_t tokens = num_tokens;
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
  place(fc1_packed, "fc1_packed", pairs * shape.intermediate / 2);
  place(fc1_sf, "fc1_sf", pairs * shape.intermediate / kGroupSize);
  const int64_t all_rows = pairs * shape.hidden * int64_t{sizeof(uint16_t)};
  place(fc2_rows, "fc2_rows", std::min(all_rows, kFc2RowsBytes));
  place(work_counter, "work_counter", is_pooled(num_tokens) ? int64_t{sizeof(int32_t)} : 0);
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
