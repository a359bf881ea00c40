// Stands for the instruction sets that a build leaves out, to be quick: tables without functions.
#include "../../csrc/params.h"

namespace attnkit {
namespace amx {
extern const Kernels kKernels;
const Kernels kKernels{"amx"};
}  // namespace amx
namespace avx512 {
extern const Kernels kKernels;
const Kernels kKernels{"avx512"};
}  // namespace avx512
namespace avx2 {
extern const Kernels kKernels;
const Kernels kKernels{"avx2"};
}  // namespace avx2
namespace wide {
extern const Kernels kKernels;
const Kernels kKernels{"wide"};
}  // namespace wide
}  // namespace attnkit
