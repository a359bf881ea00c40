// Tests of the CPU kernels without torch: every instruction set that runs here, on std::threads.
//
//     native [words of names...]     only the tests whose name holds one of them
//
// NATIVE_THREADS: the largest number of threads whose bits are compared (4).
#include <cstdio>
#include <cstdlib>
#include <string>

#include "../../csrc/cpu/instruction_set.h"
#include "attention.h"
#include "decode.h"
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

  std::vector<const attnkit::Kernels*> sets;
  for (const attnkit::Kernels* set : attnkit::available_kernels())
    if (set->forward) sets.push_back(set);  // else it was left out of this build
  for (const native::Case& c : native::attention_cases()) {
    if (!wanted(c.name)) continue;
    for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
      const native::Expected x = native::expected(c, dtype);
      for (const attnkit::Kernels* set : sets)
        if (dtype != DType::kFloat64 || set == &attnkit::kernels_for(dtype))
          note(native::test_attention(*set, x, threads));
    }
  }
  for (const native::CacheTypes types : {
           native::CacheTypes{DType::kFloat32, DType::kFloat32},
           {DType::kBFloat16, DType::kBFloat16},
           {DType::kFloat16, DType::kFloat16},
           {DType::kFloat64, DType::kFloat64},
           {DType::kFloat32, DType::kInt8},
           {DType::kBFloat16, DType::kInt8},
           {DType::kFloat32, DType::kFloat8},
           {DType::kFloat16, DType::kFloat8},
       }) {
    const auto each = [&](const auto& test) {
      for (const attnkit::Kernels* set : sets)
        if (types.q != DType::kFloat64 || set == &attnkit::kernels_for(types.q)) note(test(*set));
    };
    for (const native::Case& c : native::decode_cases()) {
      if (!wanted(c.name)) continue;
      const native::ExpectedDecode x = native::expected_decode(c, types);
      each([&](const auto& set) { return native::test_decode(set, x, threads); });
    }
    if (wanted("append"))
      each([&](const auto& set) { return native::test_append(set, types, threads); });
  }
  if (wanted("every e4m3 number"))
    for (const attnkit::Kernels* set : sets) note(native::test_every_fp8(*set));
  std::printf("%d passed, %d failed on", passed, failed);
  for (const attnkit::Kernels* set : sets) std::printf(" %s", set->name);
  std::printf("\n");
  return failed || !passed;
}
