// The CUDA operators: tensors in, params to the kernels, tensors out.  Nothing is read on the host.
//
// The tests compile this with ATTNKIT_EMULATED and link it to the emulator: then the same operators
// take CPU tensors, in a namespace of their own.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "../schemas.h"
#include "params.h"

#ifdef ATTNKIT_EMULATED
namespace emulator {
struct Options {
  unsigned order;
};
extern Options options;
extern std::string last_error;
extern long launches, threads, attributes;
void hide(void* p, size_t bytes);
}  // namespace emulator
#else
#include <Python.h>

extern "C" PyObject* PyInit__C_cuda(void) {
  static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
#endif

namespace attnkit::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

#ifdef ATTNKIT_EMULATED
struct Device {
  explicit Device(const Tensor&) {}
  cudaStream_t stream() const { return nullptr; }
  int multiprocessors() const { return 132; }
};
void check(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, what, ": ", emulator::last_error);
}
#else
class Device {
 public:
  explicit Device(const Tensor& t) : index_(t.get_device_index()), guard_(index_) {}
  cudaStream_t stream() const {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream));
    return static_cast<cudaStream_t>(stream);
  }
  int multiprocessors() const {
    int count = 1;
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, index_);
    return count;
  }

 private:
  int32_t index_;
  torch::stable::accelerator::DeviceGuard guard_;
};
void check(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}
#endif

// ---------------------------------------------------------------- tensors

using torch::headeronly::toString;

std::string shape_of(const Tensor& t) {
  std::string s = "[";
  for (int64_t d = 0; d < t.dim(); ++d) s += (d ? ", " : "") + std::to_string(t.size(d));
  return s + "]";
}

Array array_of(const Tensor& t, const char* name, int dims = 4) {
  STD_TORCH_CHECK(t.dim() == dims, name, " has shape ", shape_of(t), ", expected ", dims,
                  " dimensions");
  Array a;
  switch (t.scalar_type()) {
    case ScalarType::Float:
      a.dtype = DType::kFloat32;
      break;
    case ScalarType::BFloat16:
      a.dtype = DType::kBFloat16;
      break;
    case ScalarType::Half:
      a.dtype = DType::kFloat16;
      break;
    case ScalarType::Char:
      a.dtype = DType::kInt8;
      break;
    case ScalarType::Float8_e4m3fn:
      a.dtype = DType::kFloat8;
      break;
    default:
      STD_TORCH_CHECK(false, name, " has dtype ", toString(t.scalar_type()),
                      ", expected Float, BFloat16 or Half, or Char or Float8_e4m3fn in a cache");
  }
  a.data = const_cast<void*>(t.const_data_ptr());
  a.batch = t.stride(0), a.head = t.stride(1), a.row = t.stride(2);
  a.column = dims == 4 ? t.stride(3) : 0;
  return a;
}

int bytes_of(const Array& a) {
  if (a.dtype == DType::kFloat32) return 4;
  return a.dtype == DType::kInt8 || a.dtype == DType::kFloat8 ? 1 : 2;
}

// Whether rows can be read 16 bytes at a time.
bool aligned(const Tensor& t, const Array& a) {
  const int64_t unit = 16 / bytes_of(a);
  for (int64_t d = 0; d < 3; ++d)
    if (t.size(d) > 1 && t.stride(d) % unit) return false;
  return t.stride(3) == 1 && reinterpret_cast<uintptr_t>(a.data) % 16 == 0;
}

// The tensor, or a copy of it whose rows can be read so: every head dim is a multiple of 16.
Tensor readable(const Tensor& t, const char* name) {
  if (aligned(t, array_of(t, name))) return t;
  const Tensor copy = torch::stable::clone(t);
  return aligned(copy, array_of(copy, name)) ? copy : torch::stable::contiguous(copy);
}

// An optional tensor without gaps, if it has the dtype that is expected.
MaybeTensor contiguous(const MaybeTensor& t, ScalarType expected, const char* name) {
  if (!t.has_value()) return std::nullopt;
  STD_TORCH_CHECK(t->scalar_type() == expected, name, " has dtype ", toString(t->scalar_type()),
                  ", expected ", toString(expected));
  return t->is_contiguous() ? *t : torch::stable::contiguous(*t);
}

// The same of one that has a number for each of `count` sequences or heads.
MaybeTensor one_for_each(const MaybeTensor& t, ScalarType expected, const char* name,
                         int64_t count) {
  STD_TORCH_CHECK(!t.has_value() || (t->dim() == 1 && t->size(0) == count), name, " has shape ",
                  t.has_value() ? shape_of(*t) : "", ", expected [", count, "]");
  return contiguous(t, expected, name);
}

template <class X>
const X* data_of(const MaybeTensor& t) {
  return t.has_value() ? static_cast<const X*>(t->const_data_ptr()) : nullptr;
}

int limit_of(const std::optional<int64_t>& bound) {
  return static_cast<int>(std::clamp<int64_t>(bound.value_or(kFar), -kFar, kFar));
}

// ---------------------------------------------------------------- caches

struct Cache {
  MaybeTensor starts, block_table, batch_index, k_scale, v_scale;
};

// Where a cache holds the slots of each sequence; what DecodeParams and AppendCall have in common.
struct Places {
  MaybeTensor table, index;

  explicit Places(const Cache& cache)
      : table(contiguous(cache.block_table, ScalarType::Int, "block_table")),
        index(contiguous(cache.batch_index, ScalarType::Int, "batch_index")) {
    STD_TORCH_CHECK(!table.has_value() || !index.has_value(),
                    "block_table and batch_index are both given, expected one of them");
  }

  template <class Params>
  void fill(Params& p, const Tensor& cache, int64_t batch) const {
    STD_TORCH_CHECK(!table.has_value() || (table->dim() == 2 && table->size(0) == batch),
                    "block_table has shape ", table.has_value() ? shape_of(*table) : "",
                    ", expected [", batch, ", pages of a sequence]");
    STD_TORCH_CHECK(!index.has_value() || index->numel() == batch, "batch_index has shape ",
                    index.has_value() ? shape_of(*index) : "", ", expected [", batch, "]");
    STD_TORCH_CHECK(table.has_value() || index.has_value() || cache.size(0) == batch,
                    "the cache has ", cache.size(0), " rows, expected ", batch,
                    ", one for each sequence");
    const int64_t slots = cache.size(2);
    const int64_t capacity = table.has_value() ? slots * table->size(1) : slots;
    STD_TORCH_CHECK(capacity < kFar && cache.size(0) < kFar, "the cache has ", capacity,
                    " slots of a sequence and ", cache.size(0), " rows, expected fewer than ",
                    kFar);
    p.batch = static_cast<int>(batch);
    p.pages = static_cast<int>(cache.size(0));
    p.page_slots = static_cast<int>(std::max<int64_t>(slots, 1));
    p.capacity = static_cast<int>(capacity);
    p.by_page = divisor(static_cast<uint32_t>(p.page_slots));
    p.block_table = data_of<int32_t>(table);
    p.batch_index = data_of<int32_t>(index);
    p.table_width = table.has_value() ? static_cast<int>(table->size(1)) : 1;
  }
};

Array scales_of(const MaybeTensor& scale, const Tensor& cache, const Array& of, const char* name) {
  const bool wanted = bytes_of(of) == 1;
  STD_TORCH_CHECK(scale.has_value() == wanted, name,
                  wanted ? " is missing, expected the scales of a quantised cache"
                         : " is given, expected none: the cache is not quantised");
  if (!wanted) return {};
  const Array a = array_of(*scale, name, 3);
  STD_TORCH_CHECK(a.dtype == DType::kFloat32 && scale->size(0) == cache.size(0) &&
                      scale->size(1) == cache.size(1) && scale->size(2) == cache.size(2),
                  name, " is ", toString(scale->scalar_type()), " ", shape_of(*scale),
                  ", expected Float [", cache.size(0), ", ", cache.size(1), ", ", cache.size(2),
                  "], the cache's shape without the last dimension");
  return a;
}

// ---------------------------------------------------------------- append

struct Rotary {
  MaybeTensor cos, sin;
  bool interleaved;
};

// New tokens on their way into a cache, checked; what a launch needs lives as long.
class Append {
 public:
  Append(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
         const Tensor& lengths, const Cache& cache, const Rotary& rotary)
      : k_cache_(k_cache),
        v_cache_(v_cache),
        k_scale_(cache.k_scale),
        v_scale_(cache.v_scale),
        places_(cache) {
    p_.k = array_of(k, "k"), p_.v = array_of(v, "v");
    p_.k_cache = array_of(k_cache, "k_cache"), p_.v_cache = array_of(v_cache, "v_cache");
    p_.k_scale = scales_of(cache.k_scale, k_cache, p_.k_cache, "k_scale");
    p_.v_scale = scales_of(cache.v_scale, v_cache, p_.v_cache, "v_scale");
    STD_TORCH_CHECK(
        bytes_of(p_.k) > 1 && p_.k.dtype == p_.v.dtype && p_.k_cache.dtype == p_.v_cache.dtype &&
            (bytes_of(p_.k_cache) == 1 || p_.k_cache.dtype == p_.k.dtype),
        "k is ", toString(k.scalar_type()), ", v ", toString(v.scalar_type()), ", k_cache ",
        toString(k_cache.scalar_type()), " and v_cache ", toString(v_cache.scalar_type()),
        ", dtypes that do not fit together: expected all alike, or a cache of Char or "
        "Float8_e4m3fn");
    const auto alike = [](const Tensor& a, const Tensor& b) {
      return a.size(0) == b.size(0) && a.size(1) == b.size(1) && a.size(2) == b.size(2);
    };
    STD_TORCH_CHECK(alike(k, v) && alike(k_cache, v_cache) && k_cache.size(1) == k.size(1) &&
                        k_cache.size(3) == k.size(3) && v_cache.size(3) == v.size(3),
                    "k ", shape_of(k), ", v ", shape_of(v), ", k_cache ", shape_of(k_cache),
                    " and v_cache ", shape_of(v_cache),
                    " do not fit together, expected [batch, heads, tokens, D or Dv] twice and "
                    "[rows, heads, slots, D or Dv] twice");
    places_.fill(p_, k_cache, k.size(0));
    p_.heads = static_cast<int>(k.size(1)), p_.tokens = static_cast<int>(k.size(2));
    p_.head_dim = static_cast<int>(k.size(3)), p_.value_dim = static_cast<int>(v.size(3));
    lengths_ = one_for_each(lengths, ScalarType::Int, "lengths", k.size(0));
    p_.lengths = data_of<int32_t>(lengths_);
    STD_TORCH_CHECK(rotary.cos.has_value() == rotary.sin.has_value(),
                    rotary.cos.has_value() ? "sin" : "cos",
                    " is missing, expected cos and sin together");
    if (rotary.cos.has_value()) set_tables(rotary);
  }

  // Rotates the queries [batch, heads, queries, D], too, beside the keys: query i of sequence b as
  // one at position lengths[b] + i * step.
  Tensor rotate(const Tensor& q, int64_t step) {
    STD_TORCH_CHECK(p_.cos, "cos is missing, expected tables to rotate the queries by");
    STD_TORCH_CHECK(step == 0 || step == 1, "query_step is ", step, ", expected 0 or 1");
    Tensor turned = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2), q.size(3)});
    p_.q = array_of(q, "q"), p_.q_out = array_of(turned, "q");
    p_.q_out.data = turned.mutable_data_ptr();
    p_.q_heads = static_cast<int>(q.size(1)), p_.queries = static_cast<int>(q.size(2));
    p_.query_step = static_cast<int>(step);
    return turned;
  }

  int tokens() const { return p_.tokens; }

  void run(const Device& device) {
    p_.k_cache.data = k_cache_.mutable_data_ptr(), p_.v_cache.data = v_cache_.mutable_data_ptr();
    if (k_scale_.has_value()) p_.k_scale.data = k_scale_->mutable_data_ptr();
    if (v_scale_.has_value()) p_.v_scale.data = v_scale_->mutable_data_ptr();
    check(append(p_, device.stream()), "appending to a cache");
  }

 private:
  void set_tables(const Rotary& rotary) {
    cos_ = contiguous(rotary.cos, ScalarType::Float, "cos");
    sin_ = contiguous(rotary.sin, ScalarType::Float, "sin");
    STD_TORCH_CHECK(cos_->dim() == 2 && sin_->dim() == 2 && cos_->size(0) == sin_->size(0) &&
                        cos_->size(1) == sin_->size(1) && 2 * cos_->size(1) <= p_.head_dim,
                    "cos has shape ", shape_of(*cos_), " and sin ", shape_of(*sin_),
                    ", expected [positions, rotary_dim / 2] twice, with rotary_dim at most ",
                    p_.head_dim);
    p_.cos = data_of<float>(cos_), p_.sin = data_of<float>(sin_);
    p_.positions = static_cast<int>(std::min<int64_t>(cos_->size(0), kFar));
    p_.rotary_dim = static_cast<int>(2 * cos_->size(1));
    p_.interleaved = rotary.interleaved;
  }

  AppendCall p_{};
  Tensor k_cache_, v_cache_;
  MaybeTensor k_scale_, v_scale_, lengths_, cos_, sin_;
  Places places_;
};

void append_operator(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                     const MaybeTensor& k_scale, const MaybeTensor& v_scale, const Tensor& lengths,
                     const MaybeTensor& block_table, const MaybeTensor& batch_index,
                     const MaybeTensor& cos, const MaybeTensor& sin, bool interleaved) {
  const Cache cache{std::nullopt, block_table, batch_index, k_scale, v_scale};
  Append append(k, v, k_cache, v_cache, lengths, cache, {cos, sin, interleaved});
  append.run(Device(k));
}

// ---------------------------------------------------------------- attention

#define ATTNKIT_PARAMETERS                                                                      \
  const MaybeTensor &bias, const MaybeTensor &sinks, const MaybeTensor &keep,                   \
      const MaybeTensor &lengths, const MaybeTensor &q_segments, const MaybeTensor &k_segments, \
      const MaybeTensor &blocks, const MaybeTensor &alibi, const MaybeTensor &,                 \
      const MaybeTensor &cu_seqlens_q, const MaybeTensor &, double scale,                       \
      std::optional<int64_t> left, std::optional<int64_t> right, bool bottom_right,             \
      double softcap, double dropout_p

#define ATTNKIT_CACHE_PARAMETERS                                                             \
  const MaybeTensor &starts, const MaybeTensor &block_table, const MaybeTensor &batch_index, \
      const MaybeTensor &k_scale, const MaybeTensor &v_scale

struct Visible {  // which keys, and what is added to their scores
  MaybeTensor sinks, keep, lengths, alibi;
  double scale;
  std::optional<int64_t> left, right;
  double softcap;
};

void refuse(const MaybeTensor& bias, const MaybeTensor& q_segments, const MaybeTensor& k_segments,
            const MaybeTensor& blocks, const MaybeTensor& cu_seqlens_q, double dropout_p) {
  const auto none = [](const MaybeTensor& t, const char* name) {
    STD_TORCH_CHECK(!t.has_value(), name, " is given, expected none: no CUDA kernel takes it");
  };
  none(bias, "bias"), none(q_segments, "q_segments"), none(k_segments, "k_segments");
  none(blocks, "blocks"), none(cu_seqlens_q, "cu_seqlens_q");
  STD_TORCH_CHECK(dropout_p == 0, "dropout_p is ", dropout_p, ", expected 0: no CUDA kernel drops");
}

// [B, H, L, last], laid out as [B, L, H, last] where q is: a projection that follows needs no copy.
Tensor empty_like_layout(const Tensor& q, int64_t last) {
  const int64_t b = q.size(0), h = q.size(1), l = q.size(2);
  if (h > 1 && l > 1 && q.stride(1) < q.stride(2))
    return torch::stable::transpose(torch::stable::new_empty(q, {b, l, h, last}), 1, 2);
  return torch::stable::new_empty(q, {b, h, l, last});
}

// With `append` these tokens are written first, and the cache is as long as lengths and them; then
// nothing is refused any more.
std::tuple<Tensor, Tensor> attend(Tensor q, const Tensor& k, const Tensor& v, const Visible& o,
                                  const Cache& cache, Origin origin, int64_t splits,
                                  Append* append = nullptr,
                                  std::optional<int64_t> query_step = std::nullopt) {
  DecodeParams p{};
  p.q = array_of(q, "q"), p.k = array_of(k, "k"), p.v = array_of(v, "v");
  const bool quantised = bytes_of(p.k) == 1;
  STD_TORCH_CHECK(
      bytes_of(p.q) > 1 && p.v.dtype == p.k.dtype && (quantised || p.k.dtype == p.q.dtype), "q is ",
      toString(q.scalar_type()), ", k ", toString(k.scalar_type()), " and v ",
      toString(v.scalar_type()),
      ", dtypes that do not fit together: expected all alike, or a cache of Char or Float8_e4m3fn");
  const int64_t batch = q.size(0), q_heads = q.size(1), queries = q.size(2), kv_heads = k.size(1);
  STD_TORCH_CHECK(v.size(0) == k.size(0) && v.size(1) == kv_heads && v.size(2) == k.size(2) &&
                      k.size(3) == q.size(3) && (kv_heads ? q_heads % kv_heads == 0 : q_heads == 0),
                  "q ", shape_of(q), ", k ", shape_of(k), " and v ", shape_of(v),
                  " do not fit together, expected [batch, heads, queries, D], [rows, kv heads, "
                  "slots, D] and [rows, kv heads, slots, Dv], heads a multiple of kv heads");

  const Places places(cache);
  places.fill(p, k, batch);
  p.k_scale = scales_of(cache.k_scale, k, p.k, "k_scale");
  p.v_scale = scales_of(cache.v_scale, v, p.v, "v_scale");
  p.q_heads = static_cast<int>(q_heads), p.kv_heads = static_cast<int>(kv_heads);
  p.group = kv_heads ? static_cast<int>(q_heads / kv_heads) : 0;
  p.queries = static_cast<int>(queries);
  p.head_dim = static_cast<int>(q.size(3)), p.value_dim = static_cast<int>(v.size(3));
  const char* refused = refusal(p);
  STD_TORCH_CHECK(!refused, refused, " (head dims ", p.head_dim, " and ", p.value_dim, ")");

  const MaybeTensor lengths = one_for_each(o.lengths, ScalarType::Int, "lengths", batch);
  const MaybeTensor starts = one_for_each(cache.starts, ScalarType::Int, "starts", batch);
  const MaybeTensor sinks = one_for_each(o.sinks, ScalarType::Float, "sinks", q_heads);
  const MaybeTensor keep = contiguous(o.keep, ScalarType::Bool, "keep");
  const MaybeTensor alibi = contiguous(o.alibi, ScalarType::Float, "alibi");
  STD_TORCH_CHECK(!keep.has_value() ||
                      (keep->dim() == 2 && keep->size(0) == batch && keep->size(1) == p.capacity),
                  "keep has shape ", keep.has_value() ? shape_of(*keep) : "", ", expected [", batch,
                  ", ", p.capacity, "]");
  STD_TORCH_CHECK(!alibi.has_value() || (alibi->dim() == 2 && alibi->size(1) == q_heads &&
                                         (alibi->size(0) == 1 || alibi->size(0) == batch)),
                  "alibi has shape ", alibi.has_value() ? shape_of(*alibi) : "",
                  ", expected [1 or ", batch, ", ", q_heads, "]");
  p.lengths = data_of<int32_t>(lengths), p.starts = data_of<int32_t>(starts);
  p.added = append ? append->tokens() : 0;
  p.keep = data_of<uint8_t>(keep);
  p.sinks = data_of<float>(sinks), p.alibi = data_of<float>(alibi);
  p.alibi_batch = alibi.has_value() && alibi->size(0) > 1 ? p.q_heads : 0;
  p.scale = static_cast<float>(o.scale), p.softcap = static_cast<float>(o.softcap);
  p.left = limit_of(o.left), p.right = limit_of(o.right);
  p.origin = origin;

  const Device device(q);
  STD_TORCH_CHECK(splits >= kFill && splits <= kMaxSplits, "splits is ", splits,
                  ", expected -1 to ", kMaxSplits);
  p.plan = plan(p, static_cast<int>(splits), device.multiprocessors());
  Tensor out = empty_like_layout(q, p.value_dim);
  Tensor lse = torch::stable::new_empty(q, {batch, q_heads, queries}, ScalarType::Float);
  p.out = array_of(out, "out");
  p.lse = static_cast<float*>(lse.mutable_data_ptr());
  if (query_step.has_value()) q = append->rotate(q, *query_step);
  if (append) append->run(device);
  if (lse.numel() == 0) return {out, lse};

  q = readable(q, "q");
  const Tensor keys = readable(k, "k"), values = readable(v, "v");  // with what was appended
  p.q = array_of(q, "q"), p.k = array_of(keys, "k"), p.v = array_of(values, "v");
  const int64_t outs = part_out_size(p), sums = part_sum_size(p);
  std::optional<Tensor> parts;
  if (outs) {
    parts = torch::stable::new_empty(q, {outs + sums}, ScalarType::Float);
    p.part_out = static_cast<float*>(parts->mutable_data_ptr());
    p.part_sum = p.part_out + outs;
  }
  check(decode(p, device.stream()), "decoding");
  return {out, lse};
}

std::tuple<Tensor, Tensor> decode_operator(const Tensor& q, const Tensor& k, const Tensor& v,
                                           ATTNKIT_PARAMETERS, ATTNKIT_CACHE_PARAMETERS,
                                           int64_t splits) {
  refuse(bias, q_segments, k_segments, blocks, cu_seqlens_q, dropout_p);
  const Visible visible{sinks, keep, lengths, alibi, scale, left, right, softcap};
  return attend(q, k, v, visible, {starts, block_table, batch_index, k_scale, v_scale},
                bottom_right ? Origin::kLastOfLength : Origin::kFirstKey, splits);
}

// Appends k and v, and attends to what the cache holds then: the latter reads what the former wrote
// since a stream runs them in that order.
std::tuple<Tensor, Tensor> extend_operator(const Tensor& q, const Tensor& k, const Tensor& v,
                                           const Tensor& k_cache, const Tensor& v_cache,
                                           ATTNKIT_PARAMETERS, ATTNKIT_CACHE_PARAMETERS,
                                           const MaybeTensor& cos, const MaybeTensor& sin,
                                           bool interleaved, std::optional<int64_t> query_step,
                                           int64_t splits) {
  refuse(bias, q_segments, k_segments, blocks, cu_seqlens_q, dropout_p);
  STD_TORCH_CHECK(lengths.has_value(), "lengths is missing, expected where k is to be written");
  const Cache cache{starts, block_table, batch_index, k_scale, v_scale};
  Append append(k, v, k_cache, v_cache, *lengths, cache, {cos, sin, interleaved});
  const Visible visible{sinks, keep, lengths, alibi, scale, left, right, softcap};
  return attend(q, k_cache, v_cache, visible, cache,
                bottom_right ? Origin::kLastOfLength : Origin::kFirstKey, splits, &append,
                query_step);
}

// Plain keys and values are a cache that is full, or filled to `lengths`.
std::tuple<Tensor, Tensor> forward_operator(const Tensor& q, const Tensor& k, const Tensor& v,
                                            ATTNKIT_PARAMETERS) {
  refuse(bias, q_segments, k_segments, blocks, cu_seqlens_q, dropout_p);
  const Visible visible{sinks, keep, lengths, alibi, scale, left, right, softcap};
  return attend(q, k, v, visible, {}, bottom_right ? Origin::kLastOfCapacity : Origin::kFirstKey,
                kByLength);
}

#ifdef ATTNKIT_EMULATED
void hide(const Tensor& t) { emulator::hide(t.mutable_data_ptr(), t.numel() * t.element_size()); }
void set_order(int64_t order) { emulator::options.order = static_cast<unsigned>(order); }
std::string counts() {
  return std::to_string(emulator::launches) + " " + std::to_string(emulator::threads) + " " +
         std::to_string(emulator::attributes);
}
#endif

}  // namespace
}  // namespace attnkit::cuda

#ifdef ATTNKIT_EMULATED
#define ATTNKIT_NAMESPACE attnkit_emulated
#define ATTNKIT_DEVICE CPU
#else
#define ATTNKIT_NAMESPACE attnkit
#define ATTNKIT_DEVICE CUDA
#endif

STABLE_TORCH_LIBRARY_FRAGMENT(ATTNKIT_NAMESPACE, m) {
  m.def("cuda_forward(Tensor q, Tensor k, Tensor v, " ATTNKIT_ARGUMENTS
        ") -> (Tensor out, Tensor lse)");
  m.def("cuda_decode(Tensor q, Tensor k, Tensor v, " ATTNKIT_ARGUMENTS ", " ATTNKIT_CACHE_ARGUMENTS
        ", int splits=0) -> (Tensor out, Tensor lse)");
  m.def("cuda_append(" ATTNKIT_APPEND_ARGUMENTS ") -> ()");
  m.def("cuda_extend(" ATTNKIT_EXTEND_ARGUMENTS ", int splits=0) -> (Tensor out, Tensor lse)");
#ifdef ATTNKIT_EMULATED
  m.def("set_order(int order) -> ()");
  m.def("hide(Tensor t) -> ()");
  m.impl("hide", TORCH_BOX(&attnkit::cuda::hide));
  m.def("counts() -> str");
  m.impl("set_order", TORCH_BOX(&attnkit::cuda::set_order));
  m.impl("counts", TORCH_BOX(&attnkit::cuda::counts));
#endif
}

STABLE_TORCH_LIBRARY_IMPL(ATTNKIT_NAMESPACE, ATTNKIT_DEVICE, m) {
  m.impl("cuda_forward", TORCH_BOX(&attnkit::cuda::forward_operator));
  m.impl("cuda_decode", TORCH_BOX(&attnkit::cuda::decode_operator));
  m.impl("cuda_append", TORCH_BOX(&attnkit::cuda::append_operator));
  m.impl("cuda_extend", TORCH_BOX(&attnkit::cuda::extend_operator));
}
