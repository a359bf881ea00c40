#include "decode.h"

#include <algorithm>

#include "names.h"
#include "tensors.h"

namespace native {
namespace {

using attnkit::AttentionParams;

bool quantised(DType dtype) { return dtype == DType::kInt8 || dtype == DType::kFloat8; }
DType wide_of(DType dtype) { return dtype == DType::kFloat64 ? dtype : DType::kFloat32; }

// Where slots lie: page table[b][slot / rows].  Page size 0: one page per sequence, in order.
struct Layout {
  int64_t rows, width, pages;
  std::vector<int32_t> table;

  Layout(const Problem& x, int64_t page_size) {
    const int64_t batch = x.c.batch;
    rows = page_size ? page_size : std::max<int64_t>(x.k_rows, 1);
    width = page_size ? (x.k_rows + rows - 1) / rows : 1;
    pages = page_size ? batch * width + 3 : batch;
    table.assign(batch * width, -1);  // a page that nothing may look at
    for (const Sequence& s : x.sequences)
      for (int64_t i = s.k0 / rows; s.lk > 0 && i <= (s.k0 + s.lk - 1) / rows; ++i) {
        const int64_t n = s.entry * width + i;
        // backwards, the first of them after all others: neighbours lie apart
        table[n] = static_cast<int32_t>(page_size ? (pages - 1 - n) % pages : s.entry);
      }
  }

  // The keys of every sequence in their pages; all other slots are left as poison.
  Tensor place(const Problem& x, const std::vector<double>& values, int64_t columns,
               DType dtype) const {
    Tensor cache(pages, x.c.kv_heads, rows, columns, dtype);
    for (const Sequence& s : x.sequences)
      for (int64_t kv = 0; kv < x.c.kv_heads; ++kv)
        for (int64_t slot = s.k0; slot < s.k0 + s.lk; ++slot)
          for (int64_t d = 0; d < columns; ++d)
            encode(values[((s.entry * x.c.kv_heads + kv) * x.k_rows + slot) * columns + d], dtype,
                   cache.at(table[s.entry * width + slot / rows], kv, slot % rows, d));
    return cache;
  }
};

struct Outcome {
  Tensor out, lse;
};

// All sequences, or only number `alone`.
Outcome run(const attnkit::Kernels& kernels, const ExpectedDecode& x, int64_t page_size,
            int threads, int64_t alone = kNone) {
  const Problem& problem = x.problem;
  const Case& c = problem.c;
  const DType dtype = x.types.q, wide = wide_of(dtype);
  const Layout layout(problem, page_size);
  Tensor q(c.batch, c.q_heads, c.lq, c.head_dim, dtype);
  q.fill(problem.q);
  Tensor k = layout.place(problem, x.k, c.head_dim, x.types.cache);
  Tensor v = layout.place(problem, x.v, c.value_dim, x.types.cache);
  Tensor k_scale, v_scale, bias;
  Outcome r{Tensor(c.batch, c.q_heads, c.lq, c.value_dim, dtype),
            Tensor(c.batch, c.q_heads, c.lq, 1, wide)};

  AttentionParams p;
  std::vector<Sequence> sequences = problem.sequences;
  const int64_t first = std::max<int64_t>(alone, 0);
  p.sequences = c.batch;
  p.packed_keys = problem.packed_keys, p.packed_rows = problem.packed_rows;
  p.max_lk = problem.max_lk;
  if (alone != kNone) {
    Sequence& s = sequences[alone];
    p.sequences = 1;
    p.packed_keys = (s.lk + attnkit::kBlock - 1) / attnkit::kBlock * attnkit::kBlock;
    p.packed_rows = (s.lq + attnkit::kBlock - 1) / attnkit::kBlock * attnkit::kBlock;
    p.max_lk = s.lk;
    s.key_pad = s.row_pad = 0;
  }
  p.sequence = sequences.data() + first;
  p.max_lq = c.lq;
  p.q_heads = c.q_heads, p.kv_heads = c.kv_heads;
  p.q_rows = c.lq, p.k_rows = problem.k_rows;
  p.head_dim = c.head_dim, p.value_dim = c.value_dim;
  p.q = q.array, p.k = k.array, p.v = v.array, p.out = r.out.array;
  p.lse = r.lse.array.data;
  p.scale = c.scale, p.softcap = c.softcap;
  p.pages = {layout.table.data() + first * layout.width, layout.width, layout.rows};
  if (quantised(x.types.cache)) {
    k_scale = layout.place(problem, x.k_scale, 1, DType::kFloat32), p.k_scale = k_scale.array;
    v_scale = layout.place(problem, x.v_scale, 1, DType::kFloat32), p.v_scale = v_scale.array;
  }
  if (!problem.bias.empty()) {
    bias = Tensor(c.batch, c.q_heads, c.lq, problem.k_rows, dtype);
    p.bias = bias.fill(problem.bias).array;
  }
  if (!problem.sinks.empty()) p.sinks = problem.sinks.data();
  if (!problem.alibi.empty()) p.alibi = problem.alibi.data() + first * c.q_heads;
  if (!problem.keep.empty()) p.keep = problem.keep.data();
  if (!problem.q_segments.empty())
    p.q_segments = problem.q_segments.data(), p.k_segments = problem.k_segments.data();
  kernels.decode(p, team_of(threads));
  return r;
}

}  // namespace

std::vector<Case> decode_cases() {
  const Case base{
      .batch = 3, .q_heads = 8, .lq = 1, .lk = 600, .lengths = {600, 37, 301}, .starts = {0, 0, 0}};
  const auto with = [&](const char* name, const auto& change) {
    Case c = base;
    c.name = std::string("decode, ") + name;
    change(c);
    return c;
  };
  const auto causal = [](Case& c) { c.lq = 5, c.right = 0, c.bottom_right = true; };
  return {
      with("plain", [](Case&) {}),
      with("one head each", [](Case& c) { c.q_heads = 2; }),
      with("three rows", [](Case& c) { c.q_heads = 6; }),
      with("odd sizes", [](Case& c) { c.head_dim = 33, c.value_dim = 77; }),
      with("wide", [](Case& c) { c.head_dim = 64, c.value_dim = 128; }),
      with("many rows", [](Case& c) { c.lq = 13; }),
      with("causal", causal),
      with("a length of 0", [](Case& c) { c.lengths[1] = 0; }),
      with("padded on the left", [](Case& c) { c.starts = {3, 36, 290}; }),
      with("a window", [&](Case& c) { causal(c), c.left = 40; }),
      with("alibi", [&](Case& c) { causal(c), c.alibi = true; }),
      with("softcap", [](Case& c) { c.softcap = 1.5; }),
      with("sinks", [](Case& c) { c.sinks = true, c.lengths[1] = 0; }),
      with("keep", [&](Case& c) { causal(c), c.keep = true; }),
      with("keep, spoilt", [](Case& c) { c.keep = c.spoilt = true; }),
      with("segments", [](Case& c) { c.lq = 4, c.segments = true; }),
      with("a bias", [](Case& c) { c.bias = Bias::kDense; }),
      with("everything",
           [&](Case& c) {
             causal(c), c.left = 400, c.starts = {3, 0, 290}, c.keep = c.alibi = c.sinks = true;
             c.softcap = 2, c.spoilt = true;
           }),
  };
}

ExpectedDecode expected_decode(const Case& c, CacheTypes types) {
  ExpectedDecode x{make_problem(c), types, {}, {}, {}, {}, {}, {}};
  Problem& problem = x.problem;
  x.k = problem.k, x.v = problem.v;
  if (quantised(types.cache)) {
    Random random(c.lk);
    const auto store = [&](std::vector<double>& read, std::vector<double>& stored,
                           std::vector<double>& scales, int64_t columns) {
      for (size_t n = 0; n < read.size(); ++n) {
        const bool poisoned = std::isnan(read[n]);
        if (n % columns == 0)
          scales.push_back(poisoned ? read[n] : (1 + random.bits() % 7) / 256.0);
        if (types.cache == DType::kInt8) {
          stored[n] = poisoned ? 127 : std::nearbyint(64 * read[n]);
          read[n] = stored[n] * scales.back();
        } else {
          stored[n] = poisoned ? 0x7f : random.bits() & 0xdf;  // below 16 in magnitude
          read[n] = from_fp8(static_cast<uint8_t>(stored[n])) * scales.back();
        }
      }
    };
    store(problem.k, x.k, x.k_scale, c.head_dim);
    store(problem.v, x.v, x.v_scale, c.value_dim);
  }
  x.truth = attend(problem, DType::kFloat64, false);
  x.naive = attend(problem, types.q, false);
  return x;
}

bool test_decode(const attnkit::Kernels& kernels, const ExpectedDecode& x, int threads) {
  const Case& c = x.problem.c;
  Check check(std::string(kernels.name) + ", " + name_of(x.types.q) + " over " +
              name_of(x.types.cache) + ", " + c.name);
  Outcome first = run(kernels, x, 0, 1);
  check.close("out", first.out.values(), x.truth.out, x.naive.out, x.types.q);
  check.close("lse", first.lse.values(), x.truth.lse, x.naive.lse, wide_of(x.types.q));
  const auto same = [&](const Outcome& other, const std::string& how) {
    check.same_bits(("out" + how).c_str(), other.out.bytes, first.out.bytes);
    check.same_bits(("lse" + how).c_str(), other.lse.bytes, first.lse.bytes);
  };
  for (int n = 2; n <= threads; ++n)
    same(run(kernels, x, 0, n), " on " + std::to_string(n) + " threads");
  for (int64_t size : {8, 50, 256})
    same(run(kernels, x, size, 2), " in pages of " + std::to_string(size));
  Outcome parts{Tensor(c.batch, c.q_heads, c.lq, c.value_dim, x.types.q),
                Tensor(c.batch, c.q_heads, c.lq, 1, wide_of(x.types.q))};
  for (int64_t b = 0; b < c.batch; ++b) {
    const Outcome one = run(kernels, x, 0, 1, b);
    for (auto member : {&Outcome::out, &Outcome::lse}) {
      const auto& from = (one.*member).bytes;
      const auto size = static_cast<int64_t>(from.size()) / c.batch;
      std::copy_n(from.begin() + b * size, size, (parts.*member).bytes.begin() + b * size);
    }
  }
  same(parts, " of each sequence alone");
  return check.passed();
}

bool test_every_fp8(const attnkit::Kernels& kernels) {
  Check check(std::string(kernels.name) + ", every e4m3 number");
  const Case c{.name = "e4m3",
               .batch = 1,
               .q_heads = 1,
               .kv_heads = 1,
               .lq = 1,
               .lk = 1,
               .value_dim = 256,
               .lengths = {1},
               .starts = {0}};
  ExpectedDecode x{make_problem(c), {DType::kFloat32, DType::kFloat8}, {}, {}, {1}, {1}, {}, {}};
  x.k.assign(c.head_dim, 0);
  for (int code = 0; code < 256; ++code) x.v.push_back(code);
  const std::vector<double> found = run(kernels, x, 0, 1).out.values();
  for (int code = 0; code < 256; ++code) {
    const double right = from_fp8(static_cast<uint8_t>(code));
    if (found[code] != right && !(std::isnan(found[code]) && std::isnan(right)))
      check.fail("code " + std::to_string(code) + " is read as " + std::to_string(found[code]));
  }
  return check.passed();
}

bool test_append(const attnkit::Kernels& kernels, CacheTypes types, int threads) {
  constexpr int64_t kBatch = 2, kHeads = 3, kTokens = 4, kDim = 21, kValueDim = 9, kRotary = 12;
  constexpr int64_t kRows = 8, kWidth = 3, kPages = 7;
  Check check(std::string(kernels.name) + ", " + name_of(types.q) + " to " + name_of(types.cache) +
              ", append");
  const bool scaled = quantised(types.cache);
  const DType wide = wide_of(types.q);
  const int32_t lengths[kBatch] = {5, 14}, table[kBatch * kWidth] = {6, 2, -1, -1, 1, 4};
  Random random(7);
  std::vector<double> k = random.values(kBatch * kHeads * kTokens * kDim);
  std::vector<double> v = random.values(kBatch * kHeads * kTokens * kValueDim);
  const std::vector<double> cos = random.values(kRows * kWidth * kRotary / 2);
  const std::vector<double> sin = random.values(kRows * kWidth * kRotary / 2);
  std::fill_n(v.begin(), kValueDim, 0.0);
  if (scaled) v[2 * kValueDim + 3] = std::numeric_limits<double>::quiet_NaN();
  Tensor from_k(kBatch, kHeads, kTokens, kDim, types.q, true);
  Tensor from_v(kBatch, kHeads, kTokens, kValueDim, types.q);
  Tensor cosines(1, 1, kRows * kWidth, kRotary / 2, wide), sines(cosines.like());
  from_k.fill(k), from_v.fill(v), cosines.fill(cos), sines.fill(sin);

  for (int way = 0; way < 3; ++way) {  // not rotated, in halves, interleaved
    Tensor k_cache(kPages, kHeads, kRows, kDim, types.cache);
    Tensor v_cache(kPages, kHeads, kRows, kValueDim, types.cache);
    Tensor k_scale(kPages, kHeads, kRows, 1, DType::kFloat32), v_scale(k_scale.like());
    attnkit::AppendParams p;
    p.sequences = kBatch, p.heads = kHeads, p.tokens = kTokens;
    p.head_dim = kDim, p.value_dim = kValueDim;
    p.k = from_k.array, p.v = from_v.array;
    p.k_cache = k_cache.array, p.v_cache = v_cache.array;
    if (scaled) p.k_scale = k_scale.array, p.v_scale = v_scale.array;
    p.lengths = lengths;
    p.pages = {table, kWidth, kRows};
    if (way > 0) {
      p.cos = cosines.array.data, p.sin = sines.array.data;
      p.rotary_dim = kRotary, p.interleaved = way == 2;
    }
    kernels.append(p, team_of(1 + way % threads));

    std::vector<double> found, right, nearest;
    // what lies in one row of a cache against what should; then the row is made poison again
    const auto look = [&](Tensor& cache, Tensor& scales, int64_t page, int64_t h, int64_t row,
                          const std::vector<double>& line) {
      const auto bytes = static_cast<int64_t>(line.size()) * bytes_of(types.cache);
      double scale = 1, largest = 0;
      for (double x : line) largest = std::isnan(x) ? x : std::max(largest, std::abs(x));
      if (scaled) {
        scale = decode(scales.at(page, h, row, 0), DType::kFloat32);
        found.push_back(scale);
        right.push_back(largest / (types.cache == DType::kInt8 ? 127 : 448));
        nearest.push_back(right.back());
        std::fill_n(scales.at(page, h, row, 0), 4, 0xff);
      }
      for (size_t d = 0; d < line.size(); ++d) {
        const double x = scale * decode(cache.at(page, h, row, d), types.cache);
        if (!scaled) {
          found.push_back(x), right.push_back(line[d]);
          nearest.push_back(rounded(line[d], types.q));
          continue;
        }
        const double step = types.cache == DType::kInt8
                                ? scale / 2
                                : std::max(std::abs(line[d]) / 16, scale / 1024);
        if (std::abs(x - line[d]) > step * 1.0001) check.fail("a value is not the nearest");
      }
      std::fill_n(cache.at(page, h, row, 0), bytes, 0xff);
    };
    for (int64_t b = 0; b < kBatch; ++b)
      for (int64_t h = 0; h < kHeads; ++h)
        for (int64_t t = 0; t < kTokens; ++t) {
          const int64_t slot = lengths[b] + t, at = (b * kHeads + h) * kTokens + t;
          const int64_t page = table[b * kWidth + slot / kRows];
          std::vector<double> key(&k[at * kDim], &k[at * kDim] + kDim);
          const std::vector<double> value(&v[at * kValueDim], &v[at * kValueDim] + kValueDim);
          for (int64_t i = 0; way > 0 && i < kRotary / 2; ++i) {
            const int64_t one = way == 2 ? 2 * i : i, two = way == 2 ? 2 * i + 1 : i + kRotary / 2;
            const double c = cos[slot * kRotary / 2 + i], s = sin[slot * kRotary / 2 + i];
            const double x = key[one], y = key[two];
            key[one] = x * c - y * s, key[two] = y * c + x * s;
          }
          look(k_cache, k_scale, page, h, slot % kRows, key);
          look(v_cache, v_scale, page, h, slot % kRows, value);
        }
    for (size_t n = 0; n < right.size(); ++n)  // NaN is equal to NaN here
      if (std::isnan(right[n]) && std::isnan(found[n])) found[n] = right[n] = nearest[n] = 0;
    check.close("cache", found, right, nearest, types.q);
    for (const Tensor* t : {&k_cache, &v_cache, &k_scale, &v_scale})
      if (std::count(t->bytes.begin(), t->bytes.end(), 0xff) !=
          static_cast<int64_t>(t->bytes.size()))
        check.fail("another slot was written to");
  }
  return check.passed();
}

}  // namespace native
