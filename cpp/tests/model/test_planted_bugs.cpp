// Plants each bug in each kernel and expects the kernel's test to fail. A fault ends a process's
// use of the GPU, so each bug has a process of its own.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <iterator>
#include <string>
#include <vector>

#include "common/planted_bug.h"
#include "tests/model/harness.h"

namespace cake::model {
namespace {

constexpr const char* kBugs[] = {
    "none",
    "missing full wait",
    "missing commit wait",
    "stage reuse",
    "scale reuse",
    "accumulator reuse",
    "wrong swizzle",
    "wrong scale column",
    "wrong N",
    "missing proxy fence",
    "missing fence after",
    "missing fence before",
    "missing load wait",
    "early dependent read",
    "missing dealloc",
    "tail",
};
static_assert(std::size(kBugs) == static_cast<size_t>(PlantedBug::kCount));

// The test of each kernel that asks for planted bugs.
constexpr const char* kTests[] = {"ToyGemm.MatchesReference", "Fc1Sm100.MatchesCpuPath/N16",
                                  "Fc2Sm100.ManyBlocks"};
static_assert(std::size(kTests) == 3, "the summary's columns");

struct Outcome {
  bool planted = false;  // the kernel asked for the bug
  bool failed = false;
  std::string found;  // what the model reported first, or how else the test failed
};

Outcome run_with_bug(const char* test, int bug) {
  char self[4096] = {};
  if (readlink("/proc/self/exe", self, sizeof(self) - 1) < 0) {
    ADD_FAILURE() << "no /proc/self/exe";
    return {};
  }
  const std::string command = "CAKE_PLANTED_BUG=" + std::to_string(bug) + " timeout -k 5 120 '" +
                              self + "' --gtest_filter='" + test + "' 2>&1";
  FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) {
    ADD_FAILURE() << command;
    return {};
  }
  Outcome outcome;
  std::string line;
  for (int c; (c = std::fgetc(pipe)) != EOF;) {
    if (c != '\n') {
      line += static_cast<char>(c);
      continue;
    }
    constexpr std::string_view kModel = "model: ";
    outcome.planted |= line == "planted";
    if (line.starts_with(kModel) && outcome.found.empty()) {
      outcome.found = line.substr(kModel.size());
    }
    line.clear();
  }
  outcome.failed = pclose(pipe) != 0;
  if (outcome.found.empty()) {
    outcome.found = "wrong results";
  }
  return outcome;
}

class PlantedBugs : public ModelTest {};

TEST_F(PlantedBugs, AreCaught) {
  std::vector<std::string> rows(kBugs, std::end(kBugs));
  rows[0] = "planted";
  for (const char* test : kTests) {
    std::printf("%s\n", test);
    rows[0] += std::string(" | ") + test;
    for (int bug = 1; bug < static_cast<int>(std::size(kBugs)); ++bug) {
      const Outcome outcome = run_with_bug(test, bug);
      const char* const verdict = !outcome.planted ? "NOT PLANTED"
                                  : outcome.failed ? outcome.found.c_str()
                                                   : "NOT CAUGHT";
      std::printf("  %-22s %s\n", kBugs[bug], verdict);
      std::fflush(stdout);
      rows[bug] += " | " + std::string(verdict).substr(0, std::string_view(verdict).find(':'));
      EXPECT_TRUE(outcome.planted) << kBugs[bug] << " in " << test;
      EXPECT_TRUE(outcome.failed) << kBugs[bug] << " in " << test;
    }
  }
  add_to_summary("\nErrors planted in the kernels, and what caught them:\n");
  for (const std::string& row : rows) {
    add_to_summary("| " + row + " |");
    if (&row == &rows[0]) {
      add_to_summary("| --- | --- | --- | --- |");
    }
  }
}

}  // namespace
}  // namespace cake::model
