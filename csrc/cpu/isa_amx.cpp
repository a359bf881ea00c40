// The kernels for avx512_bf16 with the tile registers of AMX.
#include "instruction_set.h"
#if defined(ATTNKIT_KNOWS_AMX)
#include <immintrin.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "../params.h"
#include "memory.h"

#define ATTNKIT_ISA_AVX512
#define ATTNKIT_ISA_AVX512_BF16
#define ATTNKIT_ISA_AMX
#define ATTNKIT_TILES
#define ATTNKIT_VECTOR_BYTES 64
#define ATTNKIT_ISA_NAME "amx"

#if defined(__clang__)
#pragma clang attribute push(                                                                      \
    __attribute__((                                                                                \
        target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target( \
    "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16,avx2,fma,f16c,prefer-vector-width=512")
#endif
namespace attnkit::amx {
#include "kernels.inl"
}  // namespace attnkit::amx
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
