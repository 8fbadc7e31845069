// Whole calls by the model, through the public interface, against the CPU path on the same bytes:
// routing, quantizer and finalize run as they are, FC1 and FC2 are those of Blackwell.
#include <algorithm>
#include <cstdio>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "plan.h"
#include "tests/model/compare.h"
#include "tests/model/harness.h"
#include "tests/model/layer.h"

namespace cake::model {
namespace {

constexpr Device kGpu{DeviceType::kCuda, 0};
constexpr int kPoison = 0xFF;  // a NaN as a scale, as bf16 and as float; negative as a number

// An array with a part for each expert; those without weights hold NaNs.
template <class T>
class PerExpert {
 public:
  explicit PerExpert(const std::vector<T>& live)
      : memory_(static_cast<int64_t>(live.size() * sizeof(T)) / kLiveExperts *
                kKimiK3.num_experts) {
    const int64_t part = memory_.bytes() / kKimiK3.num_experts;
    const auto* const bytes = reinterpret_cast<const uint8_t*>(live.data());
    memory_.fill(kPoison);
    for (int32_t i = 0; i < kLiveExperts; ++i) {
      memory_.upload(bytes + i * part, live_expert(i) * part, part);
    }
  }
  const T* get() const { return memory_.as<T>(); }

 private:
  DeviceMemory memory_;
};

struct Layer {
  LiveLayer live;
  PerExpert<uint8_t> w13{live.w13}, w13_sf{live.w13_sf}, w2{live.w2}, w2_sf{live.w2_sf};
  PerExpert<float> fc1_alpha{live.fc1_alpha}, fc2_input_scale{live.fc2_input_scale},
      fc2_alpha{live.fc2_alpha};
  DeviceMemory input_scale{std::vector{live.input_scale}};
};

class GpuWorkspace {
 public:
  explicit GpuWorkspace(int32_t most_tokens) : memory_(workspace_bytes(kKimiK3, most_tokens)) {}
  ~GpuWorkspace() { release(memory_.as(), kGpu); }
  GpuWorkspace(const GpuWorkspace&) = delete;
  GpuWorkspace& operator=(const GpuWorkspace&) = delete;

  void poison() const { memory_.fill(kPoison); }
  void* data() const { return memory_.as(); }
  int64_t bytes() const { return memory_.bytes(); }
  // A region as a call of `num_tokens` tokens leaves it.
  template <class T = uint8_t>
  std::vector<T> download(int32_t num_tokens, Region Workspace::* region) const {
    const Region where = Workspace(kKimiK3, num_tokens).*region;
    return memory_.download<T>(where.offset, where.bytes / static_cast<int64_t>(sizeof(T)));
  }

 private:
  DeviceMemory memory_;
};

// A batch on the GPU.
class Call {
 public:
  explicit Call(const Batch& batch)
      : num_tokens_(batch.num_tokens),
        input_(batch.input),
        ids_(batch.ids),
        weights_(batch.weights),
        output_(input_.bytes()) {}

  // Poisons the output, too, so that nothing comes between this call and another.
  Status prepare(const GpuWorkspace& workspace) const {
    output_.fill(kPoison);
    return cake::prepare(kKimiK3, workspace.data(), workspace.bytes(), num_tokens_, kGpu, nullptr);
  }
  Status run(const Layer& layer, const GpuWorkspace& workspace) const {
    Arguments a;
    a.num_tokens = num_tokens_;
    a.device = kGpu;
    a.input = input_.as();
    a.input_stride = kKimiK3.hidden;
    a.topk_ids = ids_.as();
    a.topk_weights = weights_.as();
    a.w13 = layer.w13.get();
    a.w13_sf = layer.w13_sf.get();
    a.w2 = layer.w2.get();
    a.w2_sf = layer.w2_sf.get();
    a.input_scale = layer.input_scale.as<float>();
    a.fc1_alpha = layer.fc1_alpha.get();
    a.fc2_input_scale = layer.fc2_input_scale.get();
    a.fc2_alpha = layer.fc2_alpha.get();
    a.output = output_.as();
    a.workspace = workspace.data();
    a.workspace_bytes = workspace.bytes();
    return cake::run(a);
  }
  std::vector<uint16_t> output() const { return output_.download<uint16_t>(); }

 private:
  int32_t num_tokens_;
  DeviceMemory input_, ids_, weights_, output_;
};

struct Case {
  const char* routing;
  int32_t num_tokens;
  Batch (*batch)(int32_t num_tokens);
};

std::string text(const char* format, auto... values) {
  char line[512];
  std::snprintf(line, sizeof(line), format, values...);
  return line;
}

class WithLayer : public ModelTest {
 protected:
  void SetUp() override {
    ModelTest::SetUp();
    if (!IsSkipped() && !layer) {
      layer.emplace();
    }
  }
  static void TearDownTestSuite() { layer.reset(); }

  static inline std::optional<Layer> layer;
};

class FusedMoeSm100 : public WithLayer, public ::testing::WithParamInterface<Case> {
 protected:
  // The call that has just ended.
  void compare(const Batch& batch, const Expected& expected, const GpuWorkspace& workspace,
               const std::vector<uint16_t>& output) {
    const int32_t num_tokens = batch.num_tokens;
    const auto region = [&](Region Workspace::* r) { return workspace.download(num_tokens, r); };
    const auto equal = [&](Region Workspace::* r, const void* bytes) {
      const std::vector<uint8_t> got = region(r);
      return std::equal(got.begin(), got.end(), static_cast<const uint8_t*>(bytes));
    };
    EXPECT_TRUE(equal(&Workspace::input_sf, expected.regions.input_sf)) << "input scales differ";
    EXPECT_TRUE(equal(&Workspace::input_packed, expected.regions.input_packed))
        << "input codes differ";
    const std::span pairs(expected.regions.expert_pairs, expected.num_slots());
    const auto got_pairs = workspace.download<int32_t>(num_tokens, &Workspace::expert_pairs);
    ASSERT_TRUE(std::equal(pairs.begin(), pairs.end(), got_pairs.begin())) << "routing differs";

    const std::vector<uint8_t> packed = region(&Workspace::fc1_packed);
    const std::vector<uint8_t> sf = region(&Workspace::fc1_sf);
    const CodeAgreement codes = compare_rows(
        {packed.data(), sf.data()}, {expected.regions.fc1_packed, expected.regions.fc1_sf}, pairs);
    const OutputAgreement rows = compare_outputs(output, expected.output);
    expect_close(codes);
    expect_close(rows);
    EXPECT_GT(rows.rms, 0.1) << "the operands test nothing";

    const auto tiles = workspace.download<int32_t>(num_tokens, &Workspace::num_tiles);
    figures_ =
        text("| %d | %s | %d | %d | %.1e | %.1e | %.1e | %.1e |", num_tokens, GetParam().routing,
             tiles[0], make_plan(num_tokens, {Architecture::kSm100, 1}, false).tile_pairs,
             static_cast<double>(codes.other_scales) / static_cast<double>(codes.scales),
             static_cast<double>(codes.other_codes) / static_cast<double>(codes.codes),
             rows.relative_rms, rows.worst_row);
  }

  void summarize() const {
    static bool begun = false;
    if (!begun) {
      add_to_summary(text(
          "\nWhole calls by the model against the CPU path. Each was made twice eager, late and "
          "with %d random\nseeds, always with the same bits.\n",
          kRandomSeeds));
      add_to_summary(
          "| T | routing | tiles | most pairs of a tile | unequal scales | unequal codes "
          "| relative rms | worst row |\n| --- | --- | --- | --- | --- | --- | --- | --- |");
      begun = true;
    }
    add_to_summary(figures_);
  }

 private:
  std::string figures_;
};

// Two calls in one workspace, the second while the first ends.
TEST_P(FusedMoeSm100, MatchesCpuPath) {
  const Case& test = GetParam();
  const Batch batch = test.batch(test.num_tokens);
  const Expected expected(layer->live, batch);
  const GpuWorkspace workspace(test.num_tokens);
  const Call first(batch), second(batch);
  std::vector<uint16_t> output;
  run(
      [&]() -> Status {
        workspace.poison();
        CAKE_RETURN_IF_ERROR(first.prepare(workspace));
        CAKE_RETURN_IF_ERROR(second.prepare(workspace));
        CAKE_RETURN_IF_ERROR(first.run(*layer, workspace));
        return second.run(*layer, workspace);
      },
      [&] {
        if (output.empty()) {
          output = first.output();
          compare(batch, expected, workspace, output);
        }
        EXPECT_TRUE(first.output() == output) << "bits of the output changed";
        EXPECT_TRUE(second.output() == output) << "bits changed from one call to the next";
      });
  if (!HasFailure()) {
    summarize();
  }
}

INSTANTIATE_TEST_SUITE_P(
    , FusedMoeSm100,
    ::testing::Values(Case{"mixed", 1, mixed_batch}, Case{"mixed", 3, mixed_batch},
                      Case{"mixed", 8, mixed_batch}, Case{"mixed", 9, mixed_batch},
                      Case{"mixed", 16, mixed_batch}, Case{"mixed", 24, mixed_batch},
                      Case{"mixed", 32, mixed_batch}, Case{"mixed", 40, mixed_batch},
                      Case{"mixed", 64, mixed_batch}, Case{"one_expert", 3, one_expert_batch},
                      Case{"one_expert", 16, one_expert_batch},
                      Case{"one_expert", 64, one_expert_batch},
                      Case{"sixteen_experts", 300, sixteen_experts_batch},
                      // tiles of up to 128 pairs, the output columns in four parts
                      Case{"sparse", 2049, sparse_batch}),
    [](const auto& info) {
      return info.param.routing + ("_T" + std::to_string(info.param.num_tokens));
    });

class FusedMoeSm100Batches : public WithLayer {};

// 64 tokens in batches of other sizes, at other places and in company; the calls follow each other
// in one workspace.
TEST_F(FusedMoeSm100Batches, RowsDoNotDependOnTheBatch) {
  const Batch tokens = mixed_batch(64);
  struct Placed {
    int32_t token, count, row;  // so many tokens from `token` on are the rows from `row` on
    Batch batch;
  };
  std::vector<Placed> placed;
  constexpr int32_t kParts[][2] = {{0, 64},  {63, 1},  {1, 3},   {5, 8},  {20, 9},
                                   {40, 16}, {24, 24}, {32, 32}, {11, 40}};
  for (const auto& [token, count] : kParts) {
    placed.push_back({token, count, 0, tokens.part(token, count)});
  }
  placed.push_back({0, 64, 100, sixteen_experts_batch(300)});
  placed.push_back({0, 64, 1000, sparse_batch(2049)});
  int32_t most_tokens = 0;
  std::list<Call> calls;
  for (Placed& p : placed) {
    if (p.row > 0) {
      p.batch.replace(p.row, tokens);
    }
    calls.emplace_back(p.batch);
    most_tokens = std::max(most_tokens, p.batch.num_tokens);
  }
  const GpuWorkspace workspace(most_tokens);
  run(
      [&]() -> Status {
        workspace.poison();
        for (const Call& call : calls) {
          CAKE_RETURN_IF_ERROR(call.prepare(workspace));
        }
        for (const Call& call : calls) {
          CAKE_RETURN_IF_ERROR(call.run(*layer, workspace));
        }
        return {};
      },
      [&] {
        const std::vector<uint16_t> expected = calls.front().output();
        const auto row_of = [](const std::vector<uint16_t>& rows, int32_t row) {
          return std::span(rows).subspan(int64_t{row} * kKimiK3.hidden, kKimiK3.hidden);
        };
        auto p = placed.begin();
        for (const Call& call : calls) {
          const std::vector<uint16_t> output = call.output();
          for (int32_t i = 0; i < p->count; ++i) {
            EXPECT_TRUE(
                std::ranges::equal(row_of(output, p->row + i), row_of(expected, p->token + i)))
                << "token " << p->token + i << " at T = " << p->batch.num_tokens;
          }
          ++p;
        }
      });
}

}  // namespace
}  // namespace cake::model
