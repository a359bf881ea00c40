// 64-byte vectors and tile registers in plain code: the shapes of AMX on any machine, for tests.
#include <cstdint>
#include <type_traits>
#include <utility>

#include "../params.h"
#include "memory.h"

#define ATTNKIT_ISA_WIDE
#define ATTNKIT_TILES
#define ATTNKIT_VECTOR_BYTES 64
#define ATTNKIT_ISA_NAME "wide_tiles"

namespace attnkit::wide_tiles {
#include "kernels.inl"
}  // namespace attnkit::wide_tiles
