// What every CPU operator begins with: tensors checked and turned into the parameters of a kernel.
#ifndef ATTNKIT_CPU_CALL_H
#define ATTNKIT_CPU_CALL_H

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../params.h"
#include "instruction_set.h"
#include "memory.h"

namespace attnkit {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// ---------------------------------------------------------------- tensors

inline DType dtype_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::Bool:
      return DType::kBool;
    default:
      STD_TORCH_CHECK(false, name, " has a dtype that the CPU kernels do not take");
  }
}

inline Array array_of(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() == 4, name, " has ", t.dim(), " dimensions, expected 4");
  return {const_cast<void*>(t.const_data_ptr()),
          dtype_of(t, name),
          t.stride(0),
          t.stride(1),
          t.stride(2),
          t.stride(3)};
}

// A tensor of a cache, which may be quantised.
inline Array cache_of(const Tensor& t, const char* name) {
  DType dtype;
  if (t.scalar_type() == ScalarType::Char)
    dtype = DType::kInt8;
  else if (t.scalar_type() == ScalarType::Float8_e4m3fn)
    dtype = DType::kFloat8;
  else
    return array_of(t, name);
  STD_TORCH_CHECK(t.dim() == 4, name, " has ", t.dim(), " dimensions, expected 4");
  return {const_cast<void*>(t.const_data_ptr()),
          dtype,
          t.stride(0),
          t.stride(1),
          t.stride(2),
          t.stride(3)};
}

inline bool quantised(const Array& a) {
  return a.dtype == DType::kInt8 || a.dtype == DType::kFloat8;
}

template <size_t N>
Tensor empty(const std::array<int64_t, N>& sizes, const std::array<int64_t, N>& strides,
             ScalarType dtype) {
  int32_t code = aoti_torch_dtype_float32();
  if (dtype == ScalarType::Double) code = aoti_torch_dtype_float64();
  if (dtype == ScalarType::BFloat16) code = aoti_torch_dtype_bfloat16();
  if (dtype == ScalarType::Half) code = aoti_torch_dtype_float16();
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(N), sizes.data(),
                                                         strides.data(), code,
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

template <size_t N>
Tensor empty(const std::array<int64_t, N>& sizes, ScalarType dtype) {
  std::array<int64_t, N> strides;
  int64_t stride = 1;
  for (size_t i = N; i-- > 0; stride *= std::max<int64_t>(sizes[i], 1)) strides[i] = stride;
  return empty(sizes, strides, dtype);
}

// [B, H, L, D], laid out as [B, L, H, D] where `like` is: a projection that follows needs no copy.
inline Tensor empty_like_layout(const Tensor& like, int64_t last) {
  const std::array<int64_t, 4> sizes{like.size(0), like.size(1), like.size(2), last};
  const int64_t h = std::max<int64_t>(sizes[1], 1), l = std::max<int64_t>(sizes[2], 1);
  const int64_t d = std::max<int64_t>(last, 1);
  if (h > 1 && l > 1 && like.stride(1) < like.stride(2))
    return empty<4>(sizes, {l * h * d, d, h * d, 1}, like.scalar_type());
  return empty<4>(sizes, like.scalar_type());
}

inline std::optional<Tensor> contiguous(const MaybeTensor& t, ScalarType expected,
                                        const char* name) {
  if (!t.has_value()) return std::nullopt;
  STD_TORCH_CHECK(t->scalar_type() == expected, name, " has the wrong dtype for the CPU kernels");
  return t->is_contiguous() ? *t : torch::stable::contiguous(*t);
}

template <class X>
const X* data_of(const MaybeTensor& t) {
  return t.has_value() ? static_cast<const X*>(t->const_data_ptr()) : nullptr;
}

// Small per-head numbers, as double whatever they came as.
inline std::vector<double> numbers(const Tensor& t, const char* name) {
  const Tensor c = t.is_contiguous() ? t : torch::stable::contiguous(t);
  std::vector<double> r(c.numel());
  if (c.scalar_type() == ScalarType::Double)
    std::copy_n(static_cast<const double*>(c.const_data_ptr()), r.size(), r.begin());
  else if (c.scalar_type() == ScalarType::Float)
    std::copy_n(static_cast<const float*>(c.const_data_ptr()), r.size(), r.begin());
  else
    STD_TORCH_CHECK(false, name, " must be float32 or float64");
  return r;
}

// ---------------------------------------------------------------- threads

inline void run_on_pool(void (*body)(void*, int), void* context, int workers) {
  torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t w = begin; w < end; ++w) body(context, static_cast<int>(w));
  });
}

// Waking the pool takes some microseconds: not for calls that one thread ends sooner.
inline Team team_for(double flops) {
  constexpr double kWorthAThread = 4e5;
  const int threads = static_cast<int>(torch::stable::get_num_threads());
  const int useful = static_cast<int>(std::min<double>(flops / kWorthAThread, kMaxWorkers));
  return {std::max(1, std::min(threads, useful)), run_on_pool};
}

// ---------------------------------------------------------------- caches

struct CacheOptions {
  MaybeTensor starts, block_table, batch_index, k_scale, v_scale;
  int64_t added = 0;  // tokens that each sequence has beyond `lengths`
};

// The slots of a cache [pages, heads, rows, .] by sequence, and whether they exist.
class Slots {
 public:
  Slots(const Tensor& cache, int64_t sequences, const MaybeTensor& block_table,
        const MaybeTensor& batch_index)
      : count_(cache.size(0)) {
    STD_TORCH_CHECK(!block_table.has_value() || !batch_index.has_value(),
                    "block_table and batch_index are both given, expected one of them: a table "
                    "says by itself where a sequence lies");
    table_ = contiguous(block_table, ScalarType::Int, "block_table");
    const MaybeTensor index = contiguous(batch_index, ScalarType::Int, "batch_index");
    pages.rows = std::max<int64_t>(cache.size(2), 1);
    capacity = cache.size(2);
    if (table_.has_value()) {
      name_ = "block_table";
      STD_TORCH_CHECK(table_->dim() == 2 && table_->size(0) == sequences, name_, " has ",
                      table_->dim(), " dimensions and ", table_->dim() ? table_->size(0) : 0,
                      " rows, expected 2 and one row for each of ", sequences, " sequences");
      pages.width = table_->size(1);
      pages.table = data_of<int32_t>(table_);
      capacity *= pages.width;
      return;
    }
    name_ = index.has_value() ? "batch_index" : "the cache's batch";
    const int64_t found = index.has_value() ? index->numel() : count_;
    STD_TORCH_CHECK(found == sequences, name_, " has ", found, " entries, expected ", sequences,
                    ", one for each sequence");
    rows_.resize(sequences);
    if (index.has_value())
      std::copy_n(data_of<int32_t>(index), sequences, rows_.begin());
    else
      std::iota(rows_.begin(), rows_.end(), 0);
    pages.table = rows_.data();
  }

  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  // Slots [begin, end) of sequence b, which are about to be used; notes their pages in `used`.
  void check(int64_t b, int64_t begin, int64_t end, std::vector<int32_t>* used = nullptr) const {
    STD_TORCH_CHECK(0 <= begin && begin <= end && end <= capacity, "lengths[", b,
                    "] asks for slots ", begin, " to ", end, ", expected 0 to at most ", capacity,
                    ", the slots of a sequence: the cache is full, or the lengths are not its own");
    if (begin == end) return;
    for (int64_t i = begin / pages.rows; i <= (end - 1) / pages.rows; ++i) {
      const int32_t page = pages.table[b * pages.width + i];
      STD_TORCH_CHECK(0 <= page && page < count_, name_, "[", b,
                      table_.has_value() ? ", " + std::to_string(i) : "", "] is ", page,
                      ", expected 0 to ", count_ - 1);
      if (used) used->push_back(page);
    }
  }

  Pages pages;
  int64_t capacity;  // slots of a sequence

 private:
  int64_t count_;  // pages of the cache
  const char* name_;
  MaybeTensor table_;
  std::vector<int32_t> rows_;
};

// The scales of a quantised cache, one per token and head; nothing for any other.
inline Array scales_of(const MaybeTensor& scale, const Tensor& cache, const char* name) {
  const bool wanted = quantised(cache_of(cache, "cache"));
  STD_TORCH_CHECK(scale.has_value() == wanted, name,
                  wanted ? " is missing, expected the scales of a quantised cache"
                         : " is given, expected none: the cache is not quantised");
  if (!wanted) return {};
  STD_TORCH_CHECK(scale->scalar_type() == ScalarType::Float && scale->dim() == 3 &&
                      scale->size(0) == cache.size(0) && scale->size(1) == cache.size(1) &&
                      scale->size(2) == cache.size(2),
                  name,
                  " must be float32 and have the shape of the cache without the last "
                  "dimension");
  return {const_cast<void*>(scale->const_data_ptr()),
          DType::kFloat32,
          scale->stride(0),
          scale->stride(1),
          scale->stride(2),
          0};
}

// ---------------------------------------------------------------- one call

struct Options {
  MaybeTensor bias, sinks, keep, lengths, q_segments, k_segments, blocks, alibi, seed;
  MaybeTensor cu_seqlens_q, cu_seqlens_k;
  double scale;
  std::optional<int64_t> left, right;
  bool bottom_right;
  double softcap, dropout_p;
};

// Everything that AttentionParams points to and that has to outlive the kernels.
struct Call {
  AttentionParams p;
  std::vector<Sequence> sequences;
  std::vector<double> sinks, alibi;
  MaybeTensor keep, q_segments, k_segments, blocks;
  std::optional<Slots> slots;
  double flops = 0;

  // With `cache`, k and v are one: bottom-right counts from each sequence's own length.
  Call(const Tensor& q, const Tensor& k, const Tensor& v, const Options& o,
       const CacheOptions* cache = nullptr) {
    p.q = array_of(q, "q");
    p.k = cache ? cache_of(k, "k") : array_of(k, "k");
    p.v = cache ? cache_of(v, "v") : array_of(v, "v");
    STD_TORCH_CHECK(p.q.dtype != DType::kBool, "q, k and v are bool, expected floating point");
    STD_TORCH_CHECK(p.k.dtype == p.v.dtype &&
                        (quantised(p.k) ? p.q.dtype != DType::kFloat64 : p.k.dtype == p.q.dtype),
                    "q, k and v have different dtypes");
    p.q_heads = q.size(1), p.kv_heads = k.size(1);
    p.q_rows = q.size(2), p.k_rows = k.size(2);
    p.head_dim = q.size(3), p.value_dim = v.size(3);
    STD_TORCH_CHECK((cache || k.size(0) == q.size(0)) && v.size(0) == k.size(0) &&
                        v.size(1) == k.size(1) && v.size(2) == k.size(2) &&
                        k.size(3) == q.size(3) &&
                        (p.kv_heads ? p.q_heads % p.kv_heads == 0 : p.q_heads == 0),
                    "the shapes of q, k and v do not fit together");
    p.scale = o.scale, p.softcap = o.softcap, p.dropout = o.dropout_p;
    if (o.dropout_p > 0) {
      STD_TORCH_CHECK(o.seed.has_value(), "dropout_p is above 0 and seed is missing");
      p.seed = static_cast<uint64_t>(*static_cast<const int64_t*>(o.seed->const_data_ptr()));
    }
    if (cache) {
      slots.emplace(k, q.size(0), cache->block_table, cache->batch_index);
      p.pages = slots->pages;
      p.k_rows = slots->capacity;
      p.k_scale = scales_of(cache->k_scale, k, "k_scale");
      p.v_scale = scales_of(cache->v_scale, v, "v_scale");
    }
    list_sequences(q.size(0), o, cache);
    if (o.bias.has_value()) {
      p.bias = array_of(*o.bias, "bias");
      const Tensor& b = *o.bias;
      STD_TORCH_CHECK(b.size(0) == q.size(0) && b.size(1) == p.q_heads && b.size(2) == p.q_rows &&
                          b.size(3) == p.k_rows,
                      "bias is not expanded to [batch, heads, queries, keys]");
    }
    if (o.sinks.has_value()) {
      sinks = numbers(*o.sinks, "sinks");
      STD_TORCH_CHECK(static_cast<int64_t>(sinks.size()) == p.q_heads, "sinks must be [heads]");
      p.sinks = sinks.data();
    }
    if (o.alibi.has_value()) {
      const std::vector<double> slopes = numbers(*o.alibi, "alibi");
      const int64_t rows = o.alibi->size(0);
      STD_TORCH_CHECK(o.alibi->dim() == 2 && o.alibi->size(1) == p.q_heads &&
                          (rows == 1 || rows == p.sequences),
                      "alibi must be [1 or batch, heads]");
      for (int64_t s = 0; s < p.sequences; ++s)
        alibi.insert(alibi.end(), slopes.begin() + (rows == 1 ? 0 : s * p.q_heads),
                     slopes.begin() + (rows == 1 ? 0 : s * p.q_heads) + p.q_heads);
      p.alibi = alibi.data();
    }
    keep = contiguous(o.keep, ScalarType::Bool, "keep");
    q_segments = contiguous(o.q_segments, ScalarType::Int, "q_segments");
    k_segments = contiguous(o.k_segments, ScalarType::Int, "k_segments");
    blocks = contiguous(o.blocks, ScalarType::Bool, "blocks");
    const auto shaped = [&](const MaybeTensor& t, int64_t rows) {
      return !t.has_value() || (t->dim() == 2 && t->size(0) == q.size(0) && t->size(1) == rows);
    };
    STD_TORCH_CHECK(shaped(keep, p.k_rows), "keep must be [batch, keys]");
    STD_TORCH_CHECK(shaped(q_segments, p.q_rows), "q_segments must be [batch, queries]");
    STD_TORCH_CHECK(shaped(k_segments, p.k_rows), "k_segments must be [batch, keys]");
    STD_TORCH_CHECK(q_segments.has_value() == k_segments.has_value(),
                    "q_segments and k_segments belong together");
    p.keep = data_of<uint8_t>(keep);
    p.q_segments = data_of<int32_t>(q_segments);
    p.k_segments = data_of<int32_t>(k_segments);
    if (blocks.has_value()) {
      const Tensor& b = *blocks;
      const int64_t rows = (p.q_rows + kBlock - 1) / kBlock;
      const int64_t columns = (p.k_rows + kBlock - 1) / kBlock;
      STD_TORCH_CHECK(b.dim() == 4 && b.size(2) == rows && b.size(3) == columns &&
                          (b.size(0) == 1 || b.size(0) == q.size(0)) &&
                          (b.size(1) == 1 || b.size(1) == p.q_heads),
                      "blocks must be [1 or batch, 1 or heads, row blocks, key blocks]");
      p.blocks = data_of<uint8_t>(blocks);
      p.block_row = columns;
      p.block_head = b.size(1) == 1 ? 0 : rows * columns;
      p.block_batch = b.size(0) == 1 ? 0 : b.size(1) * rows * columns;
    }
  }

 private:
  void list_sequences(int64_t batch, const Options& o, const CacheOptions* cache) {
    const bool packed = o.cu_seqlens_q.has_value();
    STD_TORCH_CHECK(packed == o.cu_seqlens_k.has_value(),
                    "cu_seqlens_q and cu_seqlens_k belong together");
    const auto cu_q = contiguous(o.cu_seqlens_q, ScalarType::Int, "cu_seqlens_q");
    const auto cu_k = contiguous(o.cu_seqlens_k, ScalarType::Int, "cu_seqlens_k");
    const auto lengths = contiguous(o.lengths, ScalarType::Int, "lengths");
    const int32_t *qs = data_of<int32_t>(cu_q), *ks = data_of<int32_t>(cu_k);
    const auto starts = contiguous(cache ? cache->starts : std::nullopt, ScalarType::Int, "starts");
    const int32_t *limit = data_of<int32_t>(lengths), *start = data_of<int32_t>(starts);
    p.sequences = packed ? cu_q->numel() - 1 : batch;
    STD_TORCH_CHECK(!packed || (cu_k->numel() == cu_q->numel() && batch == 1),
                    "cu_seqlens_q and cu_seqlens_k must have equal sizes, and the batch must be 1");
    STD_TORCH_CHECK(!limit || lengths->numel() == p.sequences, "lengths must be [batch]");
    STD_TORCH_CHECK(!start || starts->numel() == p.sequences, "starts must be [batch]");
    STD_TORCH_CHECK(!start || !o.bias.has_value(), "starts and a bias are both given");
    sequences.resize(p.sequences);
    for (int64_t i = 0; i < p.sequences; ++i) {
      Sequence& s = sequences[i];
      s.entry = packed ? 0 : i;
      s.q0 = packed ? qs[i] : 0;
      s.lq = packed ? qs[i + 1] - qs[i] : p.q_rows;
      s.k0 = packed ? ks[i] : 0;
      s.lk = packed ? ks[i + 1] - ks[i] : p.k_rows;
      STD_TORCH_CHECK(s.q0 >= 0 && s.lq >= 0 && s.q0 + s.lq <= p.q_rows && s.k0 >= 0 && s.lk >= 0 &&
                          s.k0 + s.lk <= p.k_rows,
                      "cu_seqlens do not describe sequences inside the packed tensors");
      const int64_t full = s.lk;
      if (limit) s.lk = cache ? limit[i] + cache->added : std::clamp<int64_t>(limit[i], 0, s.lk);
      if (start) {  // what comes before is no part of the sequence: key 0 is the first to be seen
        s.k0 = std::clamp<int64_t>(start[i], 0, std::max<int64_t>(s.lk, 0));
        s.lk -= s.k0;
      }
      if (slots.has_value()) slots->check(i, s.k0, s.k0 + s.lk);
      s.off = o.bottom_right ? (cache ? s.lk : full) - s.lq : 0;
      s.lo = o.left.has_value() ? s.off - *o.left : -kUnbounded;
      s.hi = o.right.has_value() ? s.off + *o.right : kUnbounded;
      s.key_pad = p.packed_keys, s.row_pad = p.packed_rows;
      p.packed_keys += (s.lk + kBlock - 1) / kBlock * kBlock;
      p.packed_rows += (s.lq + kBlock - 1) / kBlock * kBlock;
      p.max_lq = std::max(p.max_lq, s.lq);
      p.max_lk = std::max(p.max_lk, s.lk);
      flops += 2.0 * s.lq * s.lk * (p.head_dim + p.value_dim + 8) * p.q_heads;
    }
    p.sequence = sequences.data();
  }
};

#define ATTNKIT_PARAMETERS                                                                      \
  const MaybeTensor &bias, const MaybeTensor &sinks, const MaybeTensor &keep,                   \
      const MaybeTensor &lengths, const MaybeTensor &q_segments, const MaybeTensor &k_segments, \
      const MaybeTensor &blocks, const MaybeTensor &alibi, const MaybeTensor &seed,             \
      const MaybeTensor &cu_seqlens_q, const MaybeTensor &cu_seqlens_k, double scale,           \
      std::optional<int64_t> left, std::optional<int64_t> right, bool bottom_right,             \
      double softcap, double dropout_p
#define ATTNKIT_OPTIONS                                                                    \
  Options options {                                                                        \
    bias, sinks, keep, lengths, q_segments, k_segments, blocks, alibi, seed, cu_seqlens_q, \
        cu_seqlens_k, scale, left, right, bottom_right, softcap, dropout_p                 \
  }

inline ScalarType lse_dtype(const Tensor& q) {
  return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

}  // namespace attnkit
#endif
