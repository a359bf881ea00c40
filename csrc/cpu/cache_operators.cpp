// Operators on a cache of keys and values: attend to it, append to it, or both in one call.
#include "call.h"

namespace attnkit {
namespace {

// The kernel holds what every chunk of keys gives every row, so many rows come some at a time.
void decode_in_turns(Call& call, const Kernels& set, const Team& team) {
  constexpr int64_t kRowsAtOnce = 64;  // of a kv head
  AttentionParams& p = call.p;
  const int64_t group = std::max<int64_t>(p.q_heads / std::max<int64_t>(p.kv_heads, 1), 1);
  p.max_lq = std::max<int64_t>(kRowsAtOnce / group, 1);
  for (int64_t first = 0; first < p.q_rows; first += p.max_lq) {
    p.max_lq = std::min(p.max_lq, p.q_rows - first);
    for (Sequence& s : call.sequences) {
      const int64_t step = first - s.q0;
      s.q0 = first, s.lq = p.max_lq;
      s.off += step, s.lo += step, s.hi += step;
    }
    set.decode(p, team);
  }
}

// Keys or values that lie in pages, or in rows chosen by an index, one after the other, for a
// kernel that knows of neither.
Array gathered(const Call& call, const Array& cache, int64_t width, std::vector<char>& memory) {
  const AttentionParams& p = call.p;
  const int64_t size = cache.dtype == DType::kFloat64 ? 8 : cache.dtype == DType::kFloat32 ? 4 : 2;
  int64_t rows = 0;
  for (const Sequence& s : call.sequences) rows = std::max(rows, s.k0 + s.lk);
  const Array to{nullptr, cache.dtype, p.kv_heads * rows * width, rows * width, width, 1};
  memory.resize(p.sequences * to.batch * size);
  const char* from = static_cast<const char*>(cache.data);
  for (int64_t b = 0; b < p.sequences; ++b)
    for (int64_t h = 0; h < p.kv_heads; ++h)
      for (int64_t j = call.sequences[b].k0, n = 0; n < call.sequences[b].lk; ++j, ++n) {
        const int64_t page = p.pages.table[b * p.pages.width + j / p.pages.rows];
        const int64_t row = page * cache.batch + h * cache.head + j % p.pages.rows * cache.row;
        std::memcpy(&memory[(b * to.batch + h * to.head + j * to.row) * size], from + row * size,
                    width * size);
      }
  Array result = to;
  result.data = memory.data();
  return result;
}

// What decoding does not take, and how the cache lies, is checked when this is made.
class Decoding {
 public:
  Decoding(const Tensor& q, const Tensor& k, const Tensor& v, const Options& o,
           const CacheOptions& cache)
      : call_(q, k, v, o, &cache),
        out_(empty_like_layout(q, v.size(3))),
        lse_(empty<3>({q.size(0), q.size(1), q.size(2)}, lse_dtype(q))),
        placed_(cache.block_table.has_value() || cache.batch_index.has_value()) {
    STD_TORCH_CHECK(!o.blocks.has_value() && !o.cu_seqlens_q.has_value() && o.dropout_p == 0,
                    "decoding takes no blocks, no packed sequences and no dropout");
    AttentionParams& p = call_.p;
    p.out = array_of(out_, "out");
    p.lse = lse_.mutable_data_ptr();
    readable_ = (p.k.column == 1 || p.head_dim <= 1) && (p.v.column == 1 || p.value_dim <= 1);
    STD_TORCH_CHECK(readable_ || !(placed_ || quantised(p.k)), "k and v have strides ", p.k.column,
                    " and ", p.v.column,
                    " in their last dimension, expected 1 for a paged or quantised cache");
  }

  std::tuple<Tensor, Tensor> run() {
    AttentionParams& p = call_.p;
    const bool few = p.q_rows * p.q_heads <= 64 * p.kv_heads;
    const Kernels& set = kernels_for(p.q.dtype);
    const Team team = team_for(call_.flops);
    if (readable_ && (few || quantised(p.k))) {
      decode_in_turns(call_, set, team);
      return {out_, lse_};
    }
    // the choice may not depend on where keys lie, for that may not change the bits
    std::vector<char> keys, values;
    if (placed_) {
      p.k = gathered(call_, p.k, p.head_dim, keys);
      p.v = gathered(call_, p.v, p.value_dim, values);
    }
    set.forward(p, team);
    return {out_, lse_};
  }

 private:
  Call call_;
  Tensor out_, lse_;
  bool placed_, readable_;
};

// New tokens k and v [sequences, heads, tokens, .] for the slots behind `lengths`; everything is
// checked when this is made, and nothing written before run().
class Appending {
 public:
  Appending(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
            const Tensor& lengths, const CacheOptions& cache, const MaybeTensor& cos,
            const MaybeTensor& sin, bool interleaved)
      : filled_(contiguous(lengths, ScalarType::Int, "lengths")),
        slots_(k_cache, k.size(0), cache.block_table, cache.batch_index) {
    p.k = array_of(k, "k");
    p.v = array_of(v, "v");
    p.k_cache = cache_of(k_cache, "k_cache");
    p.v_cache = cache_of(v_cache, "v_cache");
    p.k_scale = scales_of(cache.k_scale, k_cache, "k_scale");
    p.v_scale = scales_of(cache.v_scale, v_cache, "v_scale");
    const bool kept =
        quantised(p.k_cache) ? p.k.dtype != DType::kFloat64 : p.k_cache.dtype == p.k.dtype;
    STD_TORCH_CHECK(p.k.dtype == p.v.dtype && p.k_cache.dtype == p.v_cache.dtype && kept &&
                        p.k.dtype != DType::kBool,
                    "k, v and the cache have dtypes that do not fit together");
    p.sequences = k.size(0), p.heads = k.size(1), p.tokens = k.size(2);
    p.head_dim = k.size(3), p.value_dim = v.size(3);
    const auto alike = [](const Tensor& a, const Tensor& b) {
      return a.size(0) == b.size(0) && a.size(1) == b.size(1) && a.size(2) == b.size(2);
    };
    STD_TORCH_CHECK(alike(k, v) && alike(k_cache, v_cache) && k_cache.size(1) == p.heads &&
                        k_cache.size(3) == p.head_dim && v_cache.size(3) == p.value_dim,
                    "the shapes of k, v and the cache do not fit together");
    STD_TORCH_CHECK(filled_->numel() == p.sequences, "lengths must be [batch]");
    p.lengths = data_of<int32_t>(filled_);
    p.pages = slots_.pages;
    std::vector<int32_t> pages;
    for (int64_t b = 0; b < p.sequences; ++b) {
      slots_.check(b, p.lengths[b], p.lengths[b] + p.tokens, &pages);
      longest_ = std::max<int64_t>(longest_, p.lengths[b]);
    }
    std::sort(pages.begin(), pages.end());
    const auto twice = std::adjacent_find(pages.begin(), pages.end());
    STD_TORCH_CHECK(twice == pages.end(), "page ", *twice,
                    " of the cache belongs to two of the sequences, expected each to write to its "
                    "own");
    take_angles(cos, sin, lse_dtype(k), interleaved);
    p.k_cache.data = k_cache.mutable_data_ptr(), p.v_cache.data = v_cache.mutable_data_ptr();
    if (cache.k_scale.has_value()) p.k_scale.data = cache.k_scale->mutable_data_ptr();
    if (cache.v_scale.has_value()) p.v_scale.data = cache.v_scale->mutable_data_ptr();
  }

  // The queries that come with the tokens, to be rotated on the way: query t of sequence b as one
  // at position lengths[b] + t * step.
  Tensor rotated(const Tensor& q, int64_t step) {
    STD_TORCH_CHECK(p.cos, "query_step is given without cos and sin");
    STD_TORCH_CHECK(step == 0 || step == 1, "query_step is ", step, ", expected 0 or 1");
    STD_TORCH_CHECK(q.dim() == 4 && q.size(0) == p.sequences && q.size(3) == p.head_dim &&
                        q.scalar_type() != ScalarType::Bool && lse_dtype(q) == real_,
                    "q and k do not fit together");
    expect_angles(q.size(2) ? longest_ + (q.size(2) - 1) * step + 1 : 0);
    Tensor to = empty_like_layout(q, q.size(3));
    p.q = array_of(q, "q"), p.q_rotated = array_of(to, "q");
    p.q_heads = q.size(1), p.q_rows = q.size(2), p.q_step = step;
    return to;
  }

  void run() const {
    const int64_t values = p.sequences * (p.heads * p.tokens * (p.head_dim + p.value_dim) +
                                          p.q_heads * p.q_rows * p.head_dim);
    kernels_for(p.k.dtype).append(p, team_for(4.0 * static_cast<double>(values)));
  }

  AppendParams p;

 private:
  void take_angles(const MaybeTensor& cos, const MaybeTensor& sin, ScalarType real,
                   bool interleaved) {
    real_ = real;
    STD_TORCH_CHECK(cos.has_value() == sin.has_value(), "cos and sin belong together");
    if (!cos.has_value()) return;
    cos_ = contiguous(cos, real, "cos"), sin_ = contiguous(sin, real, "sin");
    STD_TORCH_CHECK(cos->dim() == 2 && sin->dim() == 2 && cos->size(0) == sin->size(0) &&
                        cos->size(1) == sin->size(1) && 2 * cos->size(1) <= p.head_dim,
                    "cos and sin must both be [slots, rotary_dim / 2]");
    expect_angles(p.tokens ? longest_ + p.tokens : 0);
    p.cos = cos_->const_data_ptr(), p.sin = sin_->const_data_ptr();
    p.rotary_dim = 2 * cos->size(1);
    p.interleaved = interleaved;
  }

  void expect_angles(int64_t positions) const {
    STD_TORCH_CHECK(positions <= cos_->size(0), "cos and sin have ", cos_->size(0),
                    " positions, expected at least ", positions);
  }

  MaybeTensor filled_, cos_, sin_;
  Slots slots_;
  ScalarType real_ = ScalarType::Float;
  int64_t longest_ = 0;  // of the sequences, before the new tokens
};

std::tuple<Tensor, Tensor> decode(const Tensor& q, const Tensor& k, const Tensor& v,
                                  ATTNKIT_PARAMETERS, const MaybeTensor& starts,
                                  const MaybeTensor& block_table, const MaybeTensor& batch_index,
                                  const MaybeTensor& k_scale, const MaybeTensor& v_scale) {
  const ATTNKIT_OPTIONS;
  return Decoding(q, k, v, options, {starts, block_table, batch_index, k_scale, v_scale}).run();
}

void append(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
            const MaybeTensor& k_scale, const MaybeTensor& v_scale, const Tensor& lengths,
            const MaybeTensor& block_table, const MaybeTensor& batch_index, const MaybeTensor& cos,
            const MaybeTensor& sin, bool interleaved) {
  const CacheOptions cache{std::nullopt, block_table, batch_index, k_scale, v_scale};
  Appending(k, v, k_cache, v_cache, lengths, cache, cos, sin, interleaved).run();
}

std::tuple<Tensor, Tensor> extend(const Tensor& q, const Tensor& k, const Tensor& v,
                                  const Tensor& k_cache, const Tensor& v_cache, ATTNKIT_PARAMETERS,
                                  const MaybeTensor& starts, const MaybeTensor& block_table,
                                  const MaybeTensor& batch_index, const MaybeTensor& k_scale,
                                  const MaybeTensor& v_scale, const MaybeTensor& cos,
                                  const MaybeTensor& sin, bool interleaved,
                                  std::optional<int64_t> query_step) {
  const ATTNKIT_OPTIONS;
  STD_TORCH_CHECK(lengths.has_value(), "lengths are missing, expected those of the cache");
  const CacheOptions cache{starts, block_table, batch_index, k_scale, v_scale, k.size(2)};
  Appending appending(k, v, k_cache, v_cache, *lengths, cache, cos, sin, interleaved);
  const Tensor query = query_step.has_value() ? appending.rotated(q, *query_step) : q;
  Decoding decoding(query, k_cache, v_cache, options, cache);
  appending.run();
  return decoding.run();
}

}  // namespace
}  // namespace attnkit

STABLE_TORCH_LIBRARY_IMPL(attnkit, CPU, m) {
  m.impl("cpu_decode", TORCH_BOX(&attnkit::decode));
  m.impl("cpu_append", TORCH_BOX(&attnkit::append));
  m.impl("cpu_extend", TORCH_BOX(&attnkit::extend));
}
