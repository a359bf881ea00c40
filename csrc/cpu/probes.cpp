// The operators that describe the machine: its instruction sets, and what it can do at most.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "../params.h"
#include "instruction_set.h"

namespace attnkit {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::string instruction_sets() {
  std::string all = kernels().name;
  for (const Kernels* set : available_kernels()) all += std::string(",") + set->name;
  return all;
}

int64_t probe_fma(int64_t iterations) {
  const int threads = static_cast<int>(torch::stable::get_num_threads());
  std::vector<int64_t> done(threads, 0);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t w = begin; w < end; ++w) done[w] = kernels().probe_fma(iterations);
  });
  return std::accumulate(done.begin(), done.end(), int64_t{0});
}

double probe_read(const Tensor& data) {
  STD_TORCH_CHECK(data.is_contiguous() && data.scalar_type() == ScalarType::Float,
                  "data must be contiguous float32");
  constexpr int64_t kPiece = 1 << 18;
  const int64_t n = data.numel(), pieces = (n + kPiece - 1) / kPiece;
  const auto* values = static_cast<const float*>(data.const_data_ptr());
  std::vector<double> sums(pieces, 0.0);
  torch::stable::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      sums[i] = kernels().probe_read(values + i * kPiece, 4 * std::min(kPiece, n - i * kPiece));
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

}  // namespace
}  // namespace attnkit

STABLE_TORCH_LIBRARY_IMPL(attnkit, CPU, m) {
  m.impl("cpu_probe_read", TORCH_BOX(&attnkit::probe_read));
}

STABLE_TORCH_LIBRARY_IMPL(attnkit, CompositeExplicitAutograd, m) {
  m.impl("cpu_probe_fma", TORCH_BOX(&attnkit::probe_fma));
  m.impl("cpu_instruction_sets", TORCH_BOX(&attnkit::instruction_sets));
}
