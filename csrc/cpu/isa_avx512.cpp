// The kernels for avx512.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "../params.h"
#include "memory.h"

#define ATTNKIT_ISA_AVX512
#define ATTNKIT_VECTOR_BYTES 64
#define ATTNKIT_ISA_NAME "avx512"

#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,prefer-vector-width=512")
#endif
namespace attnkit::avx512 {
#include "kernels.inl"
}  // namespace attnkit::avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
