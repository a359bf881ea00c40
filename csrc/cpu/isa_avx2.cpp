// The kernels for avx2.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "../params.h"
#include "memory.h"

#define ATTNKIT_ISA_AVX2
#define ATTNKIT_VECTOR_BYTES 32
#define ATTNKIT_ISA_NAME "avx2"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace attnkit::avx2 {
#include "kernels.inl"
}  // namespace attnkit::avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
