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
extern long launches, threads;
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

Array array_of(const Tensor& t, const char* name, int dims = 4) {
  STD_TORCH_CHECK(t.dim() == dims, name, " has ", t.dim(), " dimensions, expected ", dims);
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
      STD_TORCH_CHECK(false, name, " has a dtype that the CUDA kernels do not take");
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

MaybeTensor contiguous(const MaybeTensor& t, ScalarType expected, const char* name) {
  if (!t.has_value()) return std::nullopt;
  STD_TORCH_CHECK(t->scalar_type() == expected, name, " has the wrong dtype for the CUDA kernels");
  return t->is_contiguous() ? *t : torch::stable::contiguous(*t);
}

template <class X>
const X* data_of(const MaybeTensor& t) {
  return t.has_value() ? static_cast<const X*>(t->const_data_ptr()) : nullptr;
}

int limit_of(const std::optional<int64_t>& bound) {
  return static_cast<int>(std::clamp<int64_t>(bound.value_or(kFar), -kFar, kFar));
}

// Where a cache holds the slots of each sequence; what DecodeParams and AppendCall have in common.
struct Places {
  MaybeTensor table, index;

  Places(const MaybeTensor& block_table, const MaybeTensor& batch_index)
      : table(contiguous(block_table, ScalarType::Int, "block_table")),
        index(contiguous(batch_index, ScalarType::Int, "batch_index")) {
    STD_TORCH_CHECK(!table.has_value() || !index.has_value(),
                    "block_table and batch_index are both given, expected one of them");
  }

  template <class Params>
  void fill(Params& p, const Tensor& cache, int64_t batch) const {
    STD_TORCH_CHECK(!table.has_value() || (table->dim() == 2 && table->size(0) == batch),
                    "block_table must be [batch, pages of a sequence]");
    STD_TORCH_CHECK(!index.has_value() || index->numel() == batch, "batch_index must be [batch]");
    STD_TORCH_CHECK(table.has_value() || index.has_value() || cache.size(0) == batch,
                    "the cache has ", cache.size(0), " rows, expected ", batch,
                    ", one for each sequence");
    const int64_t slots = cache.size(2);
    const int64_t capacity = table.has_value() ? slots * table->size(1) : slots;
    STD_TORCH_CHECK(capacity < kFar && cache.size(0) < kFar,
                    "the cache has more than 2^29 slots of a sequence, or pages");
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
                  name, " must be float32, of the cache's shape without the last dimension");
  return a;
}

// ---------------------------------------------------------------- attention

#define ATTNKIT_PARAMETERS                                                                      \
  const MaybeTensor &bias, const MaybeTensor &sinks, const MaybeTensor &keep,                   \
      const MaybeTensor &lengths, const MaybeTensor &q_segments, const MaybeTensor &k_segments, \
      const MaybeTensor &blocks, const MaybeTensor &alibi, const MaybeTensor &,                 \
      const MaybeTensor &cu_seqlens_q, const MaybeTensor &, double scale,                       \
      std::optional<int64_t> left, std::optional<int64_t> right, bool bottom_right,             \
      double softcap, double dropout_p

struct Visible {  // which keys, and what is added to their scores
  MaybeTensor sinks, keep, lengths, alibi;
  double scale;
  std::optional<int64_t> left, right;
  double softcap;
};

struct Cache {
  MaybeTensor starts, block_table, batch_index, k_scale, v_scale;
};

// [B, H, L, last], laid out as [B, L, H, last] where q is: a projection that follows needs no copy.
Tensor empty_like_layout(const Tensor& q, int64_t last) {
  const int64_t b = q.size(0), h = q.size(1), l = q.size(2);
  if (h > 1 && l > 1 && q.stride(1) < q.stride(2))
    return torch::stable::transpose(torch::stable::new_empty(q, {b, l, h, last}), 1, 2);
  return torch::stable::new_empty(q, {b, h, l, last});
}

std::tuple<Tensor, Tensor> attend(const Tensor& given_q, const Tensor& k, const Tensor& v,
                                  const Visible& o, const Cache& cache, Origin origin,
                                  int64_t splits) {
  DecodeParams p{};
  p.k = array_of(k, "k"), p.v = array_of(v, "v");
  p.q = array_of(given_q, "q");
  const bool quantised = bytes_of(p.k) == 1;
  STD_TORCH_CHECK(
      bytes_of(p.q) > 1 && p.v.dtype == p.k.dtype && (quantised || p.k.dtype == p.q.dtype),
      "q, k and v have dtypes that do not fit together");
  const int64_t batch = given_q.size(0), q_heads = given_q.size(1), kv_heads = k.size(1);
  STD_TORCH_CHECK(v.size(0) == k.size(0) && v.size(1) == kv_heads && v.size(2) == k.size(2) &&
                      k.size(3) == given_q.size(3) &&
                      (kv_heads ? q_heads % kv_heads == 0 : q_heads == 0),
                  "the shapes of q, k and v do not fit together");
  STD_TORCH_CHECK(aligned(k, p.k) && aligned(v, p.v),
                  "k and v must have rows of adjacent numbers that start at multiples of 16 bytes");
  const Tensor q = aligned(given_q, p.q) ? given_q : torch::stable::clone(given_q);
  const Tensor dense = aligned(q, array_of(q, "q")) ? q : torch::stable::contiguous(q);
  p.q = array_of(dense, "q");

  const Places places(cache.block_table, cache.batch_index);
  places.fill(p, k, batch);
  p.k_scale = scales_of(cache.k_scale, k, p.k, "k_scale");
  p.v_scale = scales_of(cache.v_scale, v, p.v, "v_scale");
  p.q_heads = static_cast<int>(q_heads), p.kv_heads = static_cast<int>(kv_heads);
  p.group = kv_heads ? static_cast<int>(q_heads / kv_heads) : 0;
  p.queries = static_cast<int>(q.size(2));
  p.head_dim = static_cast<int>(q.size(3)), p.value_dim = static_cast<int>(v.size(3));
  const char* refused = refusal(p);
  STD_TORCH_CHECK(!refused, refused, " (head dims ", p.head_dim, " and ", p.value_dim, ")");

  const MaybeTensor lengths = contiguous(o.lengths, ScalarType::Int, "lengths");
  const MaybeTensor starts = contiguous(cache.starts, ScalarType::Int, "starts");
  const MaybeTensor keep = contiguous(o.keep, ScalarType::Bool, "keep");
  const MaybeTensor sinks = contiguous(o.sinks, ScalarType::Float, "sinks");
  const MaybeTensor alibi = contiguous(o.alibi, ScalarType::Float, "alibi");
  const auto per_sequence = [&](const MaybeTensor& t) {
    return !t.has_value() || t->numel() == batch;
  };
  STD_TORCH_CHECK(per_sequence(lengths) && per_sequence(starts),
                  "lengths and starts must be [batch]");
  STD_TORCH_CHECK(!keep.has_value() ||
                      (keep->dim() == 2 && keep->size(0) == batch && keep->size(1) == p.capacity),
                  "keep must be [batch, capacity]");
  STD_TORCH_CHECK(!sinks.has_value() || sinks->numel() == q_heads, "sinks must be [heads]");
  STD_TORCH_CHECK(!alibi.has_value() || (alibi->dim() == 2 && alibi->size(1) == q_heads &&
                                         (alibi->size(0) == 1 || alibi->size(0) == batch)),
                  "alibi must be [1 or batch, heads]");
  p.lengths = data_of<int32_t>(lengths), p.starts = data_of<int32_t>(starts);
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
  Tensor out = empty_like_layout(given_q, p.value_dim);
  Tensor lse = torch::stable::new_empty(q, {batch, q_heads, q.size(2)}, ScalarType::Float);
  p.out = array_of(out, "out");
  p.lse = static_cast<float*>(lse.mutable_data_ptr());
  if (lse.numel() == 0) return {out, lse};
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
                                           ATTNKIT_PARAMETERS, const MaybeTensor& starts,
                                           const MaybeTensor& block_table,
                                           const MaybeTensor& batch_index,
                                           const MaybeTensor& k_scale, const MaybeTensor& v_scale,
                                           int64_t splits) {
  STD_TORCH_CHECK(!bias.has_value() && !blocks.has_value() && !q_segments.has_value() &&
                      !k_segments.has_value() && !cu_seqlens_q.has_value() && dropout_p == 0,
                  "decoding on CUDA takes no bias, segments, blocks, packed sequences or dropout");
  const Visible visible{sinks, keep, lengths, alibi, scale, left, right, softcap};
  return attend(q, k, v, visible, {starts, block_table, batch_index, k_scale, v_scale},
                bottom_right ? Origin::kLastOfLength : Origin::kFirstKey, splits);
}

// Plain keys and values are a cache that is full, or filled to `lengths`.
std::tuple<Tensor, Tensor> forward_operator(const Tensor& q, const Tensor& k, const Tensor& v,
                                            ATTNKIT_PARAMETERS) {
  STD_TORCH_CHECK(!bias.has_value() && !blocks.has_value() && !q_segments.has_value() &&
                      !k_segments.has_value() && !cu_seqlens_q.has_value() && dropout_p == 0,
                  "attention on CUDA takes no bias, segments, blocks, packed sequences or dropout");
  const Visible visible{sinks, keep, lengths, alibi, scale, left, right, softcap};
  return attend(q, k, v, visible, {}, bottom_right ? Origin::kLastOfCapacity : Origin::kFirstKey,
                kByLength);
}

// ---------------------------------------------------------------- append

void append_operator(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                     const MaybeTensor& k_scale, const MaybeTensor& v_scale, const Tensor& lengths,
                     const MaybeTensor& block_table, const MaybeTensor& batch_index,
                     const MaybeTensor& cos, const MaybeTensor& sin, bool interleaved) {
  AppendCall p{};
  p.k = array_of(k, "k"), p.v = array_of(v, "v");
  p.k_cache = array_of(k_cache, "k_cache"), p.v_cache = array_of(v_cache, "v_cache");
  p.k_scale = scales_of(k_scale, k_cache, p.k_cache, "k_scale");
  p.v_scale = scales_of(v_scale, v_cache, p.v_cache, "v_scale");
  STD_TORCH_CHECK(bytes_of(p.k) > 1 && p.k.dtype == p.v.dtype &&
                      p.k_cache.dtype == p.v_cache.dtype &&
                      (bytes_of(p.k_cache) == 1 || p.k_cache.dtype == p.k.dtype),
                  "k, v and the cache have dtypes that do not fit together");
  const auto alike = [](const Tensor& a, const Tensor& b) {
    return a.size(0) == b.size(0) && a.size(1) == b.size(1) && a.size(2) == b.size(2);
  };
  STD_TORCH_CHECK(alike(k, v) && alike(k_cache, v_cache) && k_cache.size(1) == k.size(1) &&
                      k_cache.size(3) == k.size(3) && v_cache.size(3) == v.size(3),
                  "the shapes of k, v and the cache do not fit together");
  const Places places(block_table, batch_index);
  places.fill(p, k_cache, k.size(0));
  p.heads = static_cast<int>(k.size(1)), p.tokens = static_cast<int>(k.size(2));
  p.head_dim = static_cast<int>(k.size(3)), p.value_dim = static_cast<int>(v.size(3));
  const MaybeTensor filled = contiguous(lengths, ScalarType::Int, "lengths");
  STD_TORCH_CHECK(filled->numel() == k.size(0), "lengths must be [batch]");
  p.lengths = data_of<int32_t>(filled);
  const MaybeTensor cosines = contiguous(cos, ScalarType::Float, "cos");
  const MaybeTensor sines = contiguous(sin, ScalarType::Float, "sin");
  STD_TORCH_CHECK(cos.has_value() == sin.has_value(), "cos and sin belong together");
  if (cos.has_value()) {
    STD_TORCH_CHECK(cos->dim() == 2 && sin->dim() == 2 && cos->size(0) == sin->size(0) &&
                        cos->size(1) == sin->size(1) && 2 * cos->size(1) <= p.head_dim,
                    "cos and sin must both be [slots, rotary_dim / 2]");
    p.cos = data_of<float>(cosines), p.sin = data_of<float>(sines);
    p.positions = static_cast<int>(std::min<int64_t>(cos->size(0), kFar));
    p.rotary_dim = static_cast<int>(2 * cos->size(1));
    p.interleaved = interleaved;
  }
  if (k.size(0) * k.size(1) * k.size(2) == 0) return;
  p.k_cache.data = k_cache.mutable_data_ptr(), p.v_cache.data = v_cache.mutable_data_ptr();
  if (k_scale.has_value()) p.k_scale.data = k_scale->mutable_data_ptr();
  if (v_scale.has_value()) p.v_scale.data = v_scale->mutable_data_ptr();
  const Device device(k);
  check(append(p, device.stream()), "appending to a cache");
}

#ifdef ATTNKIT_EMULATED
void set_order(int64_t order) { emulator::options.order = static_cast<unsigned>(order); }
std::string counts() {
  return std::to_string(emulator::launches) + " " + std::to_string(emulator::threads);
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
#ifdef ATTNKIT_EMULATED
  m.def("set_order(int order) -> ()");
  m.def("counts() -> str");
  m.impl("set_order", TORCH_BOX(&attnkit::cuda::set_order));
  m.impl("counts", TORCH_BOX(&attnkit::cuda::counts));
#endif
}

STABLE_TORCH_LIBRARY_IMPL(ATTNKIT_NAMESPACE, ATTNKIT_DEVICE, m) {
  m.impl("cuda_forward", TORCH_BOX(&attnkit::cuda::forward_operator));
  m.impl("cuda_decode", TORCH_BOX(&attnkit::cuda::decode_operator));
  m.impl("cuda_append", TORCH_BOX(&attnkit::cuda::append_operator));
}
