// 16-byte vectors: SSE2 on x86-64, NEON on Arm, right everywhere.
#include <cstdint>
#include <type_traits>
#include <utility>

#include "../params.h"
#include "memory.h"

#define ATTNKIT_FLOAT64
#define ATTNKIT_VECTOR_BYTES 16
#define ATTNKIT_ISA_NAME "portable"

namespace attnkit::portable {
#include "kernels.inl"
}  // namespace attnkit::portable
