// Forward and backward of one call on one set of kernels, against the truth.
#pragma once

#include "check.h"
#include "problem.h"

namespace native {

std::vector<Case> attention_cases();

// A case, made once, for every instruction set of a type.
struct Expected {
  Problem problem;
  DType dtype;
  Results truth, naive;
};
Expected expected(const Case& c, DType dtype);

// With 1 to `threads` threads, whose bits must be the same.
bool test_attention(const attnkit::Kernels& kernels, const Expected& x, int threads);

}  // namespace native
