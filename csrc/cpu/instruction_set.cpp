#include "instruction_set.h"

#include <cstdlib>
#include <stdexcept>

namespace attnkit {

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

namespace {

struct Candidate {
  const Kernels* kernels;
  bool runs;
};

std::vector<Candidate> candidates() {
  std::vector<Candidate> all;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  all.push_back({&avx512_bf16::kKernels, avx512 && __builtin_cpu_supports("avx512bf16")});
  all.push_back({&avx512::kKernels, avx512});
  all.push_back({&avx2::kKernels, avx2});
#endif
  all.push_back({&portable::kKernels, true});
  all.push_back({&wide::kKernels, true});  // last: for tests, never chosen by itself
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

std::vector<std::string> available_instruction_sets() {
  std::vector<std::string> names;
  for (const Candidate& c : candidates())
    if (c.runs) names.push_back(c.kernels->name);
  return names;
}

}  // namespace attnkit
