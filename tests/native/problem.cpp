#include "problem.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace native {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Philox-4x32-10: counter (key / 4, query, head, batch), lane key % 4.
uint32_t philox(uint64_t seed, uint32_t key, uint32_t query, uint32_t head, uint32_t batch) {
  uint32_t c[4] = {key / 4, query, head, batch};
  uint32_t k[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c[0], b = uint64_t{0xCD9E8D57} * c[2];
    const uint32_t next[4] = {
        static_cast<uint32_t>(b >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(b),
        static_cast<uint32_t>(a >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(a)};
    std::copy_n(next, 4, c);
    k[0] += 0x9E3779B9;
    k[1] += 0xBB67AE85;
  }
  return c[key % 4];
}

void list_sequences(Problem& x) {
  const Case& c = x.c;
  const bool packed = !c.packed_q.empty();
  const int64_t count = packed ? static_cast<int64_t>(c.packed_q.size()) : c.batch;
  int64_t q0 = 0, k0 = 0;
  for (int64_t i = 0; i < count; ++i) {
    Sequence s;
    s.entry = packed ? 0 : i;
    s.q0 = q0, s.k0 = k0;
    s.lq = packed ? c.packed_q[i] : c.lq;
    s.lk = packed ? c.packed_k[i] : c.lengths.empty() ? c.lk : c.lengths[i];
    int64_t full = packed ? s.lk : c.lk;
    if (packed) q0 += s.lq, k0 += s.lk;
    if (!c.starts.empty()) {  // a cache: everything counts from its own keys
      s.k0 = c.starts[i];
      s.lk -= s.k0;
      full = s.lk;
    }
    s.off = c.bottom_right ? full - s.lq : 0;
    s.lo = c.left == kNone ? -attnkit::kUnbounded : s.off - c.left;
    s.hi = c.right == kNone ? attnkit::kUnbounded : s.off + c.right;
    s.key_pad = x.packed_keys, s.row_pad = x.packed_rows;
    x.packed_keys += (s.lk + attnkit::kBlock - 1) / attnkit::kBlock * attnkit::kBlock;
    x.packed_rows += (s.lq + attnkit::kBlock - 1) / attnkit::kBlock * attnkit::kBlock;
    x.max_lq = std::max(x.max_lq, s.lq);
    x.max_lk = std::max(x.max_lk, s.lk);
    x.sequences.push_back(s);
  }
  x.q_rows = packed ? q0 : c.lq;
  x.k_rows = packed ? k0 : c.lk;
}

// One (sequence, head): where its rows lie, and what hides its keys.
struct View {
  const Problem& x;
  const Sequence& s;
  int64_t index, h, kv;

  int64_t q_row(int64_t i) const { return (s.entry * x.c.q_heads + h) * x.q_rows + s.q0 + i; }
  int64_t k_row(int64_t j) const { return (s.entry * x.c.kv_heads + kv) * x.k_rows + s.k0 + j; }
  int64_t bias_at(int64_t i, int64_t j) const {
    const int64_t at[4] = {s.entry, h, i, j};
    int64_t flat = 0;
    for (int d = 0; d < 4; ++d) flat = flat * x.bias_size[d] + (x.bias_size[d] == 1 ? 0 : at[d]);
    return flat;
  }
  double bias(int64_t i, int64_t j) const {
    if (x.bias.empty()) return 0;
    const double b = x.bias[bias_at(i, j)];
    return x.c.bias == Bias::kBool ? (b != 0 ? 0 : -kInf) : b;
  }
  bool visible(int64_t i, int64_t j) const {
    if (j - i < s.lo || j - i > s.hi) return false;
    if (!x.keep.empty() && !x.keep[s.entry * x.k_rows + s.k0 + j]) return false;
    if (!x.q_segments.empty() &&
        x.q_segments[s.entry * x.q_rows + s.q0 + i] != x.k_segments[s.entry * x.k_rows + s.k0 + j])
      return false;
    if (!x.blocks.empty() &&
        !x.blocks[(h * x.block_rows() + i / attnkit::kBlock) * x.block_columns() +
                  j / attnkit::kBlock])
      return false;
    return bias(i, j) != -kInf;
  }
};

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t d = 0; d < n; ++d) sum += a[d] * b[d];
  return sum;
}

void add(double factor, const double* from, int64_t n, double* to) {
  for (int64_t d = 0; d < n; ++d) to[d] += factor * from[d];
}

}  // namespace

uint64_t Random::bits() {  // splitmix64
  uint64_t z = state_ += 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}

std::vector<double> Random::values(int64_t n) {
  std::vector<double> all(n);
  for (double& x : all) x = value();
  return all;
}

double rounded(double x, DType to) {
  if (to == DType::kFloat64 || x == 0 || !std::isfinite(x)) return x;
  if (to == DType::kFloat32) return static_cast<float>(x);
  const bool brain = to == DType::kBFloat16;
  const int digits = brain ? 8 : 11, lowest = brain ? -126 : -14;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(x), lowest) - digits + 1);
  return std::nearbyint(x / unit) * unit;
}

Problem make_problem(const Case& c) {
  Problem x;
  x.c = c;
  list_sequences(x);
  Random random(std::hash<std::string>{}(c.name));
  const int64_t queries = c.batch * c.q_heads * x.q_rows, keys = c.batch * c.kv_heads * x.k_rows;
  x.seed = random.bits();
  x.q = random.values(queries * c.head_dim);
  x.k = random.values(keys * c.head_dim);
  x.v = random.values(keys * c.value_dim);
  x.dout = random.values(queries * c.value_dim);
  if (c.dlse) x.dlse = random.values(queries);
  if (c.sinks) x.sinks = random.values(c.q_heads);
  if (c.alibi) {
    x.alibi = random.values(static_cast<int64_t>(x.sequences.size()) * c.q_heads);
    for (double& slope : x.alibi) slope = std::abs(slope) / 8;
  }
  if (c.keep) {
    for (int64_t j = 0; j < c.batch * x.k_rows; ++j)  // and a whole block of hidden keys
      x.keep.push_back(random.bits() % 3 != 0 && (j < 64 || j >= 128));
  }
  if (c.segments) {  // three documents, of which queries and keys have different shares
    for (int64_t i = 0; i < c.batch * x.q_rows; ++i)
      x.q_segments.push_back(static_cast<int32_t>(i % x.q_rows * 3 / x.q_rows));
    for (int64_t j = 0; j < c.batch * x.k_rows; ++j)
      x.k_segments.push_back(static_cast<int32_t>(j % x.k_rows * 4 / x.k_rows));
  }
  if (c.blocks)
    for (int64_t n = 0; n < c.q_heads * x.block_rows() * x.block_columns(); ++n)
      x.blocks.push_back(n % 3 != 1);
  if (c.bias != Bias::kNone) {
    const bool dense = c.bias == Bias::kDense || c.bias == Bias::kBool;
    if (dense) x.bias_size[0] = c.batch;
    if (dense || c.bias == Bias::kHeads) x.bias_size[1] = c.q_heads;
    if (dense || c.bias == Bias::kRows || c.bias == Bias::kHeads) x.bias_size[2] = x.q_rows;
    if (dense || c.bias == Bias::kColumns || c.bias == Bias::kHeads) x.bias_size[3] = x.k_rows;
    x.bias = random.values(x.bias_size[0] * x.bias_size[1] * x.bias_size[2] * x.bias_size[3]);
    if (c.coarse) {
      const int64_t row = x.bias_size[3];
      for (size_t n = 0; n < x.bias.size(); ++n)
        x.bias[n] = static_cast<int64_t>(n) / row % 2 ? -0x1p50 : 0;
    } else {
      for (double& b : x.bias) {
        const bool hidden = dense && random.bits() % 4 == 0;
        b = c.bias == Bias::kBool ? !hidden : hidden ? -kInf : b;
      }
    }
  }
  if (c.spoilt) {  // keys that no query of any head sees
    for (size_t index = 0; index < x.sequences.size(); ++index) {
      const Sequence& s = x.sequences[index];
      for (int64_t j = 0; j < x.k_rows; ++j) {
        bool seen = false;
        const bool inside = j >= s.k0 && j < s.k0 + s.lk;
        for (int64_t h = 0; inside && h < c.q_heads; ++h) {
          const View view{x, s, static_cast<int64_t>(index), h, h * c.kv_heads / c.q_heads};
          for (int64_t i = 0; i < s.lq; ++i) seen |= view.visible(i, j - s.k0);
        }
        if (seen) continue;
        for (int64_t kv = 0; kv < c.kv_heads; ++kv) {
          const int64_t row = (s.entry * c.kv_heads + kv) * x.k_rows + j;
          std::fill_n(&x.k[row * c.head_dim], c.head_dim, kNaN);
          std::fill_n(&x.v[row * c.value_dim], c.value_dim, kNaN);
        }
      }
    }
  }
  return x;
}

Results attend(const Problem& x, DType precision, bool gradients) {
  const Case& c = x.c;
  const auto round = [&](double value) { return rounded(value, precision); };
  const DType wide = precision == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const int64_t d = c.head_dim, dv = c.value_dim;
  Results r;
  r.out.assign(x.dout.size(), 0);
  r.lse.assign(c.batch * c.q_heads * x.q_rows, -kInf);
  if (gradients) {
    r.dq.assign(x.q.size(), 0), r.dk.assign(x.k.size(), 0), r.dv.assign(x.v.size(), 0);
    r.dbias.assign(x.bias.size(), 0), r.dsinks.assign(x.sinks.size(), 0);
  }
  for (size_t index = 0; index < x.sequences.size(); ++index)
    for (int64_t h = 0; h < c.q_heads; ++h) {
      const Sequence& s = x.sequences[index];
      const View view{x, s, static_cast<int64_t>(index), h, h * c.kv_heads / c.q_heads};
      const double alibi = x.alibi.empty() ? 0 : x.alibi[index * c.q_heads + h];
      std::vector<double> score(s.lk), slope(s.lk, 1), p(s.lk), kept(s.lk, 1);
      for (int64_t i = 0; i < s.lq; ++i) {
        const int64_t row = view.q_row(i);
        const double sink = x.sinks.empty() ? -kInf : x.sinks[h];
        double top = sink;
        for (int64_t j = 0; j < s.lk; ++j) {
          score[j] = -kInf;
          if (!view.visible(i, j)) continue;
          double z = round(c.scale * dot(&x.q[row * d], &x.k[view.k_row(j) * d], d));
          if (c.softcap > 0) {
            const double t = std::tanh(z / c.softcap);
            z = round(c.softcap * t);
            slope[j] = 1 - t * t;
          }
          z = round(z - alibi * static_cast<double>(std::abs(j - (i + s.off))));
          // a bias of another type than the call's is added in float
          score[j] = c.coarse ? rounded(z + view.bias(i, j), wide) : round(z + view.bias(i, j));
          top = std::max(top, score[j]);
        }
        if (top == -kInf) continue;
        double sum = std::exp(sink - top);
        for (int64_t j = 0; j < s.lk; ++j) sum += p[j] = std::exp(score[j] - top);
        double* out = r.out.data() + row * dv;
        for (int64_t j = 0; j < s.lk; ++j) {
          p[j] = round(p[j] / sum);
          if (c.dropout > 0) {
            const uint32_t bits = philox(x.seed, static_cast<uint32_t>(j), static_cast<uint32_t>(i),
                                         static_cast<uint32_t>(h), static_cast<uint32_t>(index));
            kept[j] = (bits >> 8) * 0x1p-24 >= c.dropout ? 1 / (1 - c.dropout) : 0;
          }
          if (score[j] != -kInf) add(round(p[j] * kept[j]), &x.v[view.k_row(j) * dv], dv, out);
        }
        for (int64_t n = 0; n < dv; ++n) out[n] = round(out[n]);
        r.lse[row] = rounded(top + std::log(sum), wide);
        if (!gradients) continue;

        const double* dout = &x.dout[row * dv];
        const double delta = dot(dout, out, dv) - (x.dlse.empty() ? 0 : x.dlse[row]);
        if (!x.sinks.empty()) r.dsinks[h] -= std::exp(sink - top) / sum * delta;
        for (int64_t j = 0; j < s.lk; ++j) {
          if (score[j] == -kInf) continue;
          const int64_t key = view.k_row(j);
          const double dp = round(kept[j] * round(dot(dout, &x.v[key * dv], dv)));
          const double ds = round(p[j] * (dp - delta));
          if (!x.bias.empty()) r.dbias[view.bias_at(i, j)] += ds;
          const double dx = round(ds * slope[j]);
          add(c.scale * dx, &x.k[key * d], d, &r.dq[row * d]);
          add(c.scale * dx, &x.q[row * d], d, &r.dk[key * d]);
          add(round(p[j] * kept[j]), dout, dv, &r.dv[key * dv]);
        }
      }
    }
  for (auto* all : {&r.dq, &r.dk, &r.dv, &r.dbias})
    for (double& value : *all) value = round(value);
  return r;
}

}  // namespace native
