#include "attention.h"

#include <algorithm>

#include "names.h"
#include "tensors.h"

namespace native {
namespace {

using attnkit::AttentionParams;
using attnkit::kBlock;

// What a call gives back, and one that it takes.
struct Outcome {
  Tensor out, lse, dq, dk, dv, dbias;
  std::vector<double> dsinks;
};

// The gradients of a bias that is broadcast have a pass of their own.
bool is_broadcast(const Problem& x) {
  return x.bias_size[0] != x.c.batch || x.bias_size[1] != x.c.q_heads ||
         x.bias_size[2] != x.q_rows || x.bias_size[3] != x.k_rows;
}

bool any_coarse(const std::vector<double>& lse, DType wide) {
  const double limit = wide == DType::kFloat64 ? attnkit::kCoarse<double> : attnkit::kCoarse<float>;
  return std::any_of(lse.begin(), lse.end(),
                     [&](double x) { return std::isfinite(x) && std::abs(x) >= limit; });
}

Outcome run(const attnkit::Kernels& kernels, const Problem& x, DType dtype, int threads) {
  const Case& c = x.c;
  const DType wide = dtype == DType::kFloat64 ? dtype : DType::kFloat32;
  const bool by_rows = c.name.size() % 2;  // both layouts occur
  const auto queries = [&](int64_t columns) {
    return Tensor(c.batch, c.q_heads, x.q_rows, columns, dtype, by_rows);
  };
  const auto keys = [&](int64_t columns) {
    return Tensor(c.batch, c.kv_heads, x.k_rows, columns, dtype, by_rows);
  };
  const auto per_row = [&] { return Tensor(c.batch, c.q_heads, x.q_rows, 1, wide); };
  Tensor q = queries(c.head_dim), k = keys(c.head_dim), v = keys(c.value_dim);
  Tensor dout = queries(c.value_dim), dlse, low, bias;
  q.fill(x.q), k.fill(x.k), v.fill(x.v), dout.fill(x.dout);

  Outcome r{queries(c.value_dim),
            per_row(),
            queries(c.head_dim),
            keys(c.head_dim),
            keys(c.value_dim),
            Tensor(),
            {}};
  // what no sequence reaches is the caller's to define
  const bool partly = !c.lengths.empty() || !c.packed_q.empty();
  if (partly) r.dk.clear(), r.dv.clear();

  AttentionParams p;
  p.sequences = static_cast<int64_t>(x.sequences.size());
  p.q_heads = c.q_heads, p.kv_heads = c.kv_heads;
  p.q_rows = x.q_rows, p.k_rows = x.k_rows;
  p.head_dim = c.head_dim, p.value_dim = c.value_dim;
  p.max_lq = x.max_lq, p.max_lk = x.max_lk;
  p.packed_keys = x.packed_keys, p.packed_rows = x.packed_rows;
  p.sequence = x.sequences.data();
  p.q = q.array, p.k = k.array, p.v = v.array, p.out = r.out.array;
  p.lse = r.lse.array.data;
  p.scale = c.scale, p.softcap = c.softcap, p.dropout = c.dropout, p.seed = x.seed;
  const auto* size = x.bias_size;
  const DType bias_dtype = c.bias == Bias::kBool ? DType::kBool : c.coarse ? wide : dtype;
  if (!x.bias.empty()) {
    bias = Tensor(size[0], size[1], size[2], size[3], bias_dtype);
    p.bias = bias.fill(x.bias).array;
    int64_t* strides[] = {&p.bias.batch, &p.bias.head, &p.bias.row, &p.bias.column};
    const int64_t whole[] = {c.batch, c.q_heads, x.q_rows, x.k_rows};
    for (int d = 0; d < 4; ++d)
      if (size[d] != whole[d]) *strides[d] = 0;
  }
  if (!x.sinks.empty()) p.sinks = x.sinks.data();
  if (!x.alibi.empty()) p.alibi = x.alibi.data();
  if (!x.keep.empty()) p.keep = x.keep.data();
  if (!x.q_segments.empty()) p.q_segments = x.q_segments.data(), p.k_segments = x.k_segments.data();
  if (!x.blocks.empty()) {
    p.blocks = x.blocks.data();
    p.block_row = x.block_columns(), p.block_head = x.block_rows() * x.block_columns();
  }
  const attnkit::Team team = team_of(threads);
  kernels.forward(p, team);

  p.dout = dout.array, p.dq = r.dq.array, p.dk = r.dk.array, p.dv = r.dv.array;
  if (c.dlse) dlse = per_row(), p.dlse = dlse.fill(x.dlse).array.data;
  if (any_coarse(r.lse.values(), wide)) {
    low = per_row();
    p.low = low.clear().array.data;
    kernels.row_sums(p, team);
  }
  const int64_t slots = (x.max_lq + kBlock - 1) / kBlock;
  std::vector<double> sums(c.sinks ? p.sequences * c.q_heads * slots : 0);
  if (c.sinks) p.dsinks = sums.data();
  const bool wanted = c.bias != Bias::kNone && c.bias != Bias::kBool;
  const bool broadcast = wanted && is_broadcast(x);
  if (wanted) {
    r.dbias = Tensor(size[0], size[1], size[2], size[3], bias_dtype);
    if (!broadcast || partly) r.dbias.clear();
    p.bias_batch = size[0], p.bias_head = size[1], p.bias_row = size[2], p.bias_column = size[3];
    if (!broadcast) p.dbias = r.dbias.array;
  }
  kernels.backward(p, team);
  if (broadcast) {
    p.dbias = r.dbias.array;
    kernels.bias_gradient(p, team);
  }
  if (c.sinks) {
    r.dsinks.assign(c.q_heads, 0);
    for (size_t n = 0; n < sums.size(); ++n)
      r.dsinks[static_cast<int64_t>(n) / slots % c.q_heads] += sums[n];
  }
  return r;
}

}  // namespace

std::vector<Case> attention_cases() {
  const int64_t kHere = 0;
  return {
      {.name = "plain"},
      {.name = "one key", .lq = 1, .lk = 1, .head_dim = 1, .value_dim = 1},
      {.name = "no key", .lk = 0},
      {.name = "nothing in a head", .lq = 5, .lk = 9, .head_dim = 0},
      {.name = "odd sizes", .lq = 67, .lk = 129, .head_dim = 33, .value_dim = 17},
      {.name = "wide values", .lq = 13, .lk = 77, .head_dim = 40, .value_dim = 130},
      {.name = "a negative scale", .scale = -0.25},
      {.name = "causal", .lq = 150, .lk = 150, .right = kHere},
      {.name = "causal, more queries", .lq = 150, .lk = 70, .right = kHere},
      {.name = "bottom right", .right = kHere, .bottom_right = true},
      {.name = "bottom right, more queries", .lq = 150, .right = kHere, .bottom_right = true},
      {.name = "a window", .lq = 200, .lk = 210, .left = 20, .right = 9},
      {.name = "a causal window",
       .lq = 200,
       .lk = 210,
       .left = 64,
       .right = 0,
       .bottom_right = true},
      {.name = "lengths", .lengths = {0, 97}},
      {.name = "spoilt beyond lengths", .right = kHere, .lengths = {64, 131}, .spoilt = true},
      {.name = "keep", .keep = true},
      {.name = "keep, spoilt", .keep = true, .spoilt = true},
      {.name = "segments", .segments = true},
      {.name = "blocks", .lq = 140, .lk = 200, .blocks = true},
      {.name = "a bias", .bias = Bias::kDense},
      {.name = "a bias, causal, spoilt", .right = kHere, .bias = Bias::kDense, .spoilt = true},
      {.name = "a bias per query", .bias = Bias::kRows},
      {.name = "a bias per key", .bias = Bias::kColumns},
      {.name = "a bias for the batch", .bias = Bias::kHeads},
      {.name = "a boolean bias", .bias = Bias::kBool},
      {.name = "a bias of -2^50", .bias = Bias::kDense, .coarse = true, .scale = 0},
      {.name = "alibi", .alibi = true},
      {.name = "softcap", .softcap = 1.5},
      {.name = "sinks", .sinks = true},
      {.name = "sinks, no key", .lk = 0, .sinks = true},
      {.name = "a gradient of lse", .dlse = true},
      {.name = "dropout", .dropout = 0.3},
      {.name = "groups of heads", .q_heads = 6},
      {.name = "one kv head", .batch = 1, .q_heads = 3, .kv_heads = 1},
      {.name = "packed", .batch = 1, .packed_q = {70, 0, 13, 101}, .packed_k = {65, 3, 128, 101}},
      {.name = "packed, causal, dropout",
       .batch = 1,
       .right = kHere,
       .packed_q = {33, 1, 90},
       .packed_k = {40, 70, 90},
       .alibi = true,
       .sinks = true,
       .dropout = 0.2},
      {.name = "everything",
       .q_heads = 4,
       .lq = 150,
       .lk = 170,
       .value_dim = 40,
       .left = 100,
       .right = 3,
       .bottom_right = true,
       .lengths = {170, 122},
       .keep = true,
       .segments = true,
       .blocks = true,
       .bias = Bias::kDense,
       .alibi = true,
       .sinks = true,
       .dlse = true,
       .softcap = 2,
       .dropout = 0.25},
      {.name = "a long head",
       .batch = 1,
       .q_heads = 1,
       .kv_heads = 1,
       .lq = 1024,
       .lk = 1088,
       .head_dim = 32,
       .value_dim = 32,
       .right = kHere,
       .bottom_right = true},
  };
}

Expected expected(const Case& c, DType dtype) {
  Expected x{make_problem(c), dtype, {}, {}};
  x.truth = attend(x.problem, DType::kFloat64, true);
  x.naive = attend(x.problem, dtype, true);
  return x;
}

bool test_attention(const attnkit::Kernels& kernels, const Expected& x, int threads) {
  Check check(std::string(kernels.name) + ", " + name_of(x.dtype) + ", " + x.problem.c.name);
  const DType wide = x.dtype == DType::kFloat64 ? x.dtype : DType::kFloat32;
  Outcome first = run(kernels, x.problem, x.dtype, 1);
  const Results &truth = x.truth, &naive = x.naive;
  check.close("out", first.out.values(), truth.out, naive.out, x.dtype);
  check.close("lse", first.lse.values(), truth.lse, naive.lse, wide);
  check.close("dq", first.dq.values(), truth.dq, naive.dq, x.dtype);
  check.close("dk", first.dk.values(), truth.dk, naive.dk, x.dtype);
  check.close("dv", first.dv.values(), truth.dv, naive.dv, x.dtype);
  if (first.dbias) check.close("dbias", first.dbias.values(), truth.dbias, naive.dbias, x.dtype);
  check.close("dsinks", first.dsinks, truth.dsinks, naive.dsinks, x.dtype);
  for (int n = 2; n <= threads; ++n) {
    const Outcome other = run(kernels, x.problem, x.dtype, n);
    const std::string by = " on " + std::to_string(n) + " threads";
    check.same_bits(("out" + by).c_str(), other.out.bytes, first.out.bytes);
    check.same_bits(("lse" + by).c_str(), other.lse.bytes, first.lse.bytes);
    check.same_bits(("dq" + by).c_str(), other.dq.bytes, first.dq.bytes);
    check.same_bits(("dk" + by).c_str(), other.dk.bytes, first.dk.bytes);
    check.same_bits(("dv" + by).c_str(), other.dv.bytes, first.dv.bytes);
    check.same_bits(("dbias" + by).c_str(), other.dbias.bytes, first.dbias.bytes);
    check.same_bits(("dsinks" + by).c_str(), other.dsinks, first.dsinks);
  }
  return check.passed();
}

}  // namespace native
