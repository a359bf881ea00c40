// One attention call as the kernels see it: raw pointers, element strides, no torch types.
#pragma once

#include <cstdint>

namespace attnkit {

// kFloat8 is float8_e4m3fn.  The 8-bit types are those of quantised caches.
enum class DType : int32_t { kFloat32, kBFloat16, kFloat16, kFloat64, kBool, kInt8, kFloat8 };

// A strided [batch, head, row, column] array.  Strides count elements.
struct Array {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t batch = 0, head = 0, row = 0, column = 0;
};

// One sequence of the batch, or one packed sequence (then all of them live in batch entry 0).
// Key j is visible to query i when lo <= j - i <= hi, and nothing else hides it.
struct Sequence {
  int64_t entry = 0;       // index in the tensors' batch dimension
  int64_t q0 = 0, lq = 0;  // first query row and number of queries
  int64_t k0 = 0, lk = 0;  // first key row and number of keys (after lengths)
  int64_t lo = 0, hi = 0;
  int64_t off = 0;  // position of query 0 among the keys, for ALiBi
  int64_t key_pad =
      0;  // first row of this sequence in the packed keys, which are padded per sequence
  int64_t row_pad = 0;  // the same for the packed queries of the backward pass
};

// An lse of this size or more is a coarse sum: its last digit is worth 2^-11 (see row_sums.inl).
template <class T>
constexpr T kCoarse = sizeof(T) == 4 ? T{4096} : T{4096} * (1 << 29);

constexpr int64_t kUnbounded = int64_t{1} << 60;
constexpr int64_t kBlock = 64;  // rows and columns of one flag of `blocks`, and of one packed block

// Where a cache holds slot j of sequence b: in row j % rows of page table[b * width + j / rows].
// One that is not paged has a single page per sequence.
struct Pages {
  const int32_t* table = nullptr;
  int64_t width = 1, rows = 1;
};

struct AttentionParams {
  int64_t sequences = 0, q_heads = 0, kv_heads = 0;
  int64_t q_rows = 0, k_rows = 0;  // row counts of the tensors (lse and bias are indexed with them)
  int64_t head_dim = 0, value_dim = 0;
  int64_t max_lq = 0, max_lk = 0;
  int64_t packed_keys = 0, packed_rows = 0;  // sums of the padded lengths
  const Sequence* sequence = nullptr;

  Array q, k, v, out;
  void* lse = nullptr;  // [entries, q_heads, q_rows] in the accumulation type

  Array bias;                     // data == nullptr: none; dtype kBool: true = attend
  const double* sinks = nullptr;  // [q_heads]
  const double* alibi = nullptr;  // [sequences, q_heads]
  const uint8_t* keep = nullptr;  // [entries, k_rows]
  const int32_t* q_segments = nullptr;
  const int32_t* k_segments = nullptr;
  const uint8_t* blocks = nullptr;
  int64_t block_batch = 0, block_head = 0, block_row = 0;  // element strides of blocks

  double scale = 1, softcap = 0, dropout = 0;
  uint64_t seed = 0;

  // Decoding only: k and v are [page, head, row, column].
  Pages pages;
  Array k_scale, v_scale;  // float32 [page, head, row]; data == nullptr: k and v are not quantised

  // The backward pass only (out and lse are inputs then).
  Array dout, dq, dk, dv, dbias;  // data == nullptr where not wanted
  const void* dlse = nullptr;     // like lse, or nullptr
  void* low = nullptr;            // like lse: what row_sums.inl adds to it, or nullptr
  double* dsinks = nullptr;       // [sequences, q_heads, ceil(max_lq / kBlock)] partial sums
  int64_t bias_batch = 1, bias_head = 1, bias_row = 1, bias_column = 1;  // sizes of dbias
};

// New tokens to be written behind those that a cache holds.
struct AppendParams {
  int64_t sequences = 0, heads = 0, tokens = 0;
  int64_t head_dim = 0, value_dim = 0;
  Array k, v;                        // [sequence, head, token, column]
  Array k_cache, v_cache;            // [page, head, row, column]
  Array k_scale, v_scale;            // as in AttentionParams
  const int32_t* lengths = nullptr;  // [sequences]: token t goes to slot lengths[b] + t
  Pages pages;
  const void* cos = nullptr;  // [slots, rotary_dim / 2] in the accumulation type, or nullptr
  const void* sin = nullptr;
  int64_t rotary_dim = 0;
  bool interleaved = false;
  // Queries that are rotated along with them: query t as one at position lengths[b] + t * q_step.
  int64_t q_heads = 0, q_rows = 0, q_step = 0;
  Array q, q_rotated;  // [sequence, head, row, column]
};

// How the kernels reach the thread pool: run(body, ctx, workers) calls body(ctx, w) for every w.
struct Team {
  int threads = 1;
  void (*run)(void (*body)(void*, int), void* ctx, int workers) = nullptr;
};

// The kernels of one instruction set.
struct Kernels {
  const char* name;
  void (*forward)(const AttentionParams&, const Team&);
  void (*row_sums)(const AttentionParams&, const Team&);
  void (*backward)(const AttentionParams&, const Team&);
  void (*bias_gradient)(const AttentionParams&, const Team&);
  void (*decode)(const AttentionParams&, const Team&);
  void (*append)(const AppendParams&, const Team&);
  int64_t (*probe_fma)(int64_t iterations);
  double (*probe_read)(const void* data, int64_t bytes);
};

}  // namespace attnkit
