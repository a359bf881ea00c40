#include "instruction_set.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(ATTNKIT_KNOWS_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace attnkit {

#if defined(ATTNKIT_KNOWS_AMX)
namespace amx {
extern const Kernels kKernels;
}
#endif
#if defined(__x86_64__)
namespace avx512_bf16 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
#endif
namespace portable {
extern const Kernels kKernels;
}
namespace wide {
extern const Kernels kKernels;
}
namespace wide_tiles {
extern const Kernels kKernels;
}

namespace {

struct Candidate {
  const Kernels* kernels;
  bool runs;
};

#if defined(ATTNKIT_KNOWS_AMX)
// Whether the processor has tile registers for bfloat16, and Linux lets this process use them: it
// has to be asked, once, since they make every thread's state 8 KiB larger.
bool may_use_tiles() {
  unsigned a, b, c, d;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kAmxBf16) || !(d & kAmxTile)) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

std::vector<Candidate> candidates() {
  std::vector<Candidate> all;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
#if defined(ATTNKIT_KNOWS_AMX)
  static const bool tiles = bf16 && may_use_tiles();
  all.push_back({&amx::kKernels, tiles});
#endif
  // Intel's pairs take four times as long as an FMA of as many bits: float32 is faster there.
  const bool slow_pairs = __builtin_cpu_is("intel");
  if (!slow_pairs) all.push_back({&avx512_bf16::kKernels, bf16});
  all.push_back({&avx512::kKernels, avx512});
  if (slow_pairs) all.push_back({&avx512_bf16::kKernels, bf16});
  all.push_back({&avx2::kKernels, avx2});
#endif
  all.push_back({&portable::kKernels, true});
  all.push_back({&wide::kKernels, true});  // for tests, never chosen by themselves
  all.push_back({&wide_tiles::kKernels, true});
  return all;
}

const Kernels& choose() {
  const char* forced = std::getenv("ATTNKIT_CPU_ISA");
  std::string names;
  for (const Candidate& c : candidates()) {
    if (!forced || !*forced) {
      if (c.runs) return *c.kernels;
      continue;
    }
    if (c.kernels->name == std::string(forced)) {
      if (c.runs) return *c.kernels;
      throw std::runtime_error("ATTNKIT_CPU_ISA is " + std::string(forced) +
                               ", which this processor does not have");
    }
    names += std::string(names.empty() ? "" : ", ") + c.kernels->name;
  }
  throw std::runtime_error("ATTNKIT_CPU_ISA is " + std::string(forced) + ", expected one of " +
                           names);
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

const Kernels& kernels_for(DType dtype) {
  return dtype == DType::kFloat64 ? portable::kKernels : kernels();
}

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> all;
  for (const Candidate& c : candidates())
    if (c.runs) all.push_back(c.kernels);
  return all;
}

}  // namespace attnkit
