// What one test finds wrong, and how far a result may be from the truth.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "../../csrc/params.h"
#include "problem.h"

namespace native {

class Check {
 public:
  explicit Check(std::string name) : name_(std::move(name)) {}

  void fail(const std::string& what) {
    failed_ = true;
    std::printf("FAILED %s: %s\n", name_.c_str(), what.c_str());
  }

  // The error is at most twice that of the naive formula in the same type, plus float noise and
  // what rounding the result costs.
  void close(const char* what, const std::vector<double>& found, const std::vector<double>& truth,
             const std::vector<double>& naive, DType dtype) {
    double largest = 0, theirs = 0;
    for (size_t n = 0; n < truth.size(); ++n)
      if (std::isfinite(truth[n])) {
        largest = std::max(largest, std::abs(truth[n]));
        theirs = std::max(theirs, std::abs(naive[n] - truth[n]));
      }
    const double noise = dtype == DType::kFloat64 ? 0x1p-44 : 0x1p-16;  // of sums of some hundred
    const double rounding = dtype == DType::kBFloat16  ? 0x1p-9
                            : dtype == DType::kFloat16 ? 0x1p-12
                                                       : 0;
    const double allowed = 2 * theirs + noise * (1 + largest) + rounding * largest;
    if (found.size() != truth.size()) return fail(std::string(what) + " has another size");
    for (size_t n = 0; n < truth.size(); ++n) {
      const bool right =
          std::isfinite(truth[n]) ? std::abs(found[n] - truth[n]) <= allowed : found[n] == truth[n];
      if (right) continue;
      char text[160];
      std::snprintf(text, sizeof text, "%s[%zu] is %.9g, expected %.9g, allowed error %.3g", what,
                    n, found[n], truth[n], allowed);
      return fail(text);
    }
  }

  template <class Bytes>
  void same_bits(const char* what, const Bytes& found, const Bytes& expected) {
    if (found != expected) fail(std::string(what) + " has other bits");
  }

  bool passed() const { return !failed_; }

 private:
  std::string name_;
  bool failed_ = false;
};

}  // namespace native
