// Decoding over caches, contiguous and in pages, of every type, and appending to them.
#pragma once

#include "check.h"
#include "problem.h"

namespace native {

struct CacheTypes {
  DType q, cache;  // cache: that of q, kInt8 or kFloat8
};

std::vector<Case> decode_cases();

// A case over a cache, made once for every instruction set.
struct ExpectedDecode {
  Problem problem;  // keys and values as they are read back from the cache
  CacheTypes types;
  std::vector<double> k, v, k_scale, v_scale;  // what is stored; 8-bit types as their bytes
  Results truth, naive;
};
ExpectedDecode expected_decode(const Case& c, CacheTypes types);

// With 1 to `threads` threads, in pages of some sizes, and each sequence alone: all the same bits.
bool test_decode(const attnkit::Kernels& kernels, const ExpectedDecode& x, int threads);

// Every e4m3 number there is, as a value of the only key.
bool test_every_fp8(const attnkit::Kernels& kernels);

// New tokens in pages, rotated in each way, and nothing else touched.
bool test_append(const attnkit::Kernels& kernels, CacheTypes types, int threads);

}  // namespace native
