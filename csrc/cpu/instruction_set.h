// Which kernels run on this machine.
#pragma once

#include <vector>

#include "../params.h"

// GCC 10 does not know the instructions of AMX.
#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define ATTNKIT_KNOWS_AMX
#endif

namespace attnkit {

// The widest kernels that this processor runs, or those that ATTNKIT_CPU_ISA names.
// Throws std::runtime_error if it names one that does not exist or cannot run here.
const Kernels& kernels();

// The same for a call of this dtype: float64 has kernels of its own, portable ones.
const Kernels& kernels_for(DType dtype);

// All kernels that run here, widest first.
std::vector<const Kernels*> available_kernels();

}  // namespace attnkit
