// Tests of the CPU kernels without torch: every instruction set that runs here, on std::threads.
//
//     native [words of names...]     only the tests whose name holds one of them
//
// NATIVE_THREADS: the largest number of threads whose bits are compared (4).
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../../csrc/cpu/instruction_set.h"
#include "attention.h"
#include "names.h"

using attnkit::DType;

int main(int count, char** words) {
  const char* most = std::getenv("NATIVE_THREADS");
  const int threads = most ? std::atoi(most) : 4;
  int passed = 0, failed = 0;
  const auto wanted = [&](const std::string& name) {
    bool any = count < 2;
    for (int w = 1; w < count; ++w) any |= name.find(words[w]) != std::string::npos;
    return any;
  };
  const auto note = [&](bool good) { ++(good ? passed : failed); };

  const auto sets = attnkit::available_kernels();
  for (const native::Case& c : native::attention_cases()) {
    if (!wanted(c.name)) continue;
    for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
      const native::Expected x = native::expected(c, dtype);
      for (const attnkit::Kernels* set : sets)
        if (dtype != DType::kFloat64 || set == &attnkit::kernels_for(dtype))
          note(native::test_attention(*set, x, threads));
    }
  }
  std::printf("%d passed, %d failed on", passed, failed);
  for (const attnkit::Kernels* set : sets) std::printf(" %s", set->name);
  std::printf("\n");
  return failed || !passed;
}
