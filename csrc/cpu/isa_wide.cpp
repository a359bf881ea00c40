// 64-byte vectors and bfloat16 pairs in plain code: the AVX-512 kernels' shapes on any machine, for
// tests.
#include <cstdint>
#include <type_traits>
#include <utility>

#include "../params.h"
#include "memory.h"

#define ATTNKIT_ISA_WIDE
#define ATTNKIT_VECTOR_BYTES 64
#define ATTNKIT_ISA_NAME "wide"

namespace attnkit::wide {
#include "kernels.inl"
}  // namespace attnkit::wide
