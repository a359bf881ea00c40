// One attention call in plain numbers, and its exact answer: what the kernels are compared with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../../csrc/params.h"

namespace native {

using attnkit::DType;
using attnkit::Sequence;

constexpr int64_t kNone = -1;

// What a bias is not broadcast over.
enum class Bias { kNone, kDense, kRows, kColumns, kHeads, kBool };

// Which features a call has.  Without a word about them: no mask, nothing added, one length.
struct Case {
  std::string name;
  int64_t batch = 2, q_heads = 2, kv_heads = 2;
  int64_t lq = 70, lk = 150, head_dim = 24, value_dim = 24;
  int64_t left = kNone, right = kNone;  // the band around the diagonal
  bool bottom_right = false;
  std::vector<int64_t> lengths = {};  // keys per sequence
  std::vector<int64_t> starts = {};   // decoding: the first key per sequence
  std::vector<int64_t> packed_q = {},
                       packed_k = {};  // lengths of packed sequences (batch must be 1)
  bool keep = false, segments = false, blocks = false;
  Bias bias = Bias::kNone;
  bool coarse = false;  // a float bias of -2^50 over whole rows, which leaves lse no digits
  bool alibi = false, sinks = false, dlse = false;
  bool spoilt = false;  // NaN in keys and values that nothing may see
  double softcap = 0, dropout = 0, scale = 0.25;
};

// The numbers of a call.  All arrays are dense: [entries, heads, rows, columns].
struct Problem {
  Case c;
  std::vector<Sequence> sequences;
  int64_t q_rows = 0, k_rows = 0, packed_keys = 0, packed_rows = 0, max_lq = 0, max_lk = 0;
  uint64_t seed = 0;
  std::vector<double> q, k, v, dout, dlse, bias, sinks, alibi;
  int64_t bias_size[4] = {1, 1, 1, 1};
  std::vector<uint8_t> keep, blocks;  // blocks: [1, heads, row blocks, key blocks]
  std::vector<int32_t> q_segments, k_segments;

  int64_t block_rows() const { return (q_rows + attnkit::kBlock - 1) / attnkit::kBlock; }
  int64_t block_columns() const { return (k_rows + attnkit::kBlock - 1) / attnkit::kBlock; }
};

struct Results {
  std::vector<double> out, lse, dq, dk, dv, dbias, dsinks;
};

// Numbers that float16, bfloat16 and the wider types all hold exactly, the same for the same seed.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits();
  double value() { return static_cast<double>(static_cast<int64_t>(bits() % 255) - 127) / 64; }
  std::vector<double> values(int64_t n);

 private:
  uint64_t state_;
};

Problem make_problem(const Case& c);

// The formula, row by row, in double; every tensor on the way is rounded to `precision`, as the
// naive formula in that type would do it.  kFloat64: the truth.
Results attend(const Problem& x, DType precision, bool gradients);

// To the nearest number of a floating-point type.
double rounded(double x, DType to);

}  // namespace native
