// How far results may be from the CPU path: the gates of src/cake/testing/numeric.py.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <span>

#include "common/nvfp4.h"
#include "cpu/stages.h"

namespace cake::model {

struct CodeAgreement {
  int64_t scales = 0, other_scales = 0;
  int64_t codes = 0, other_codes = 0;  // of groups with equal scales
  int32_t largest_step = 0;            // between two scales, in codes
  int64_t at_row = 0, at_group = 0;    // where that is
};

// Row i of `got` against row pairs[i] of `expected`, of the intermediate.
inline CodeAgreement compare_rows(const cpu::QuantizedRows& got, const cpu::QuantizedRows& expected,
                                  std::span<const int32_t> pairs) {
  constexpr int64_t kGroups = kKimiK3.intermediate / kGroupSize;
  constexpr int64_t kGroupBytes = kGroupSize / 2;
  CodeAgreement found;
  for (size_t row = 0; row < pairs.size(); ++row) {
    for (int64_t group = 0; group < kGroups; ++group) {
      const int64_t a = static_cast<int64_t>(row) * kGroups + group;
      const int64_t b = pairs[row] * kGroups + group;
      ++found.scales;
      if (got.sf[a] != expected.sf[b]) {
        ++found.other_scales;
        const int32_t step = std::abs(got.sf[a] - expected.sf[b]);
        if (step > found.largest_step) {
          found.largest_step = step;
          found.at_row = static_cast<int64_t>(row);
          found.at_group = group;
        }
        continue;
      }
      found.codes += kGroupSize;
      for (int64_t i = 0; i < kGroupBytes; ++i) {
        const int differing =
            got.packed[a * kGroupBytes + i] ^ expected.packed[b * kGroupBytes + i];
        found.other_codes += ((differing & 0x0F) != 0) + ((differing & 0xF0) != 0);
      }
    }
  }
  return found;
}

inline void expect_close(const CodeAgreement& found) {
  EXPECT_LE(found.largest_step, 1)
      << "intermediate: scale of row " << found.at_row << ", group " << found.at_group;
  EXPECT_LE(found.other_scales * 100, found.scales) << "intermediate: scales less than 99 % equal";
  EXPECT_LE(found.other_codes * 1000, found.codes * 2)
      << "intermediate: codes less than 99.8 % equal";
}

struct OutputAgreement {
  int64_t other_kinds = 0;  // places where one is NaN, +Inf, -Inf or finite and the other is not
  int64_t at_row = -1;      // the first of them
  double rms = 0;           // of `expected`, over finite places
  double relative_rms = 0;  // of the difference
  double worst_row = 0;     // its relative L2 error
  int64_t worst_row_at = 0;
};

// bf16 [rows, kKimiK3.hidden].
inline OutputAgreement compare_outputs(std::span<const uint16_t> got,
                                       std::span<const uint16_t> expected) {
  const auto kind = [](float x) { return std::isnan(x) ? 3 : std::isinf(x) ? (x > 0 ? 1 : 2) : 0; };
  constexpr size_t kColumns = kKimiK3.hidden;
  OutputAgreement found;
  double all_squares = 0, all_errors = 0;
  for (size_t row = 0; row < expected.size() / kColumns; ++row) {
    double squares = 0, errors = 0;
    for (size_t i = row * kColumns; i < (row + 1) * kColumns; ++i) {
      const float x = bf16_to_float(got[i]);
      const float y = bf16_to_float(expected[i]);
      if (kind(x) != kind(y)) {
        found.at_row = found.other_kinds++ == 0 ? static_cast<int64_t>(row) : found.at_row;
      } else if (kind(y) == 0) {
        squares += double{y} * y;
        errors += (double{x} - y) * (double{x} - y);
      }
    }
    const double error = errors == 0 ? 0 : std::sqrt(errors / squares);
    if (error > found.worst_row) {
      found.worst_row = error;
      found.worst_row_at = static_cast<int64_t>(row);
    }
    all_squares += squares;
    all_errors += errors;
  }
  found.rms = std::sqrt(all_squares / static_cast<double>(expected.size()));
  found.relative_rms = all_errors == 0 ? 0 : std::sqrt(all_errors / all_squares);
  return found;
}

inline void expect_close(const OutputAgreement& found) {
  EXPECT_EQ(found.other_kinds, 0) << "output: NaN or Inf, first in row " << found.at_row;
  EXPECT_LE(found.relative_rms, 0.15 / 13) << "output";
  EXPECT_LE(found.worst_row, 0.1) << "output: row " << found.worst_row_at;
}

}  // namespace cake::model
