// New keys and values into a cache: rotated and quantised, if asked for, on their way.
#include "device.cuh"

namespace attnkit::cuda {
namespace {

constexpr int kTokens = 4;  // of a block, one per warp
constexpr float kLargestInt8 = 127, kLargestFp8 = 448;

// To the nearest, ties to even; what is too large becomes the largest.
__device__ __forceinline__ uint8_t to_int8(float x) {
  const float whole = fminf(fmaxf(rintf(x), -kLargestInt8), kLargestInt8);
  return static_cast<uint8_t>(static_cast<int8_t>(whole));
}

__device__ __forceinline__ uint8_t to_fp8(float x) {
  const float size = fminf(fabsf(x), kLargestFp8);
  const uint32_t sign = __float_as_uint(x) >> 24 & 0x80;
  if (x != x) return static_cast<uint8_t>(sign | 0x7f);
  if (size < 0x1p-6f)  // subnormal: a multiple of 2^-9, the last digit of this sum
    return static_cast<uint8_t>(sign | (__float_as_uint(size + 0x1p14f) & 0xff));
  uint32_t bits = __float_as_uint(size);
  bits += 0x7ffff + (bits >> 20 & 1);
  return static_cast<uint8_t>(sign | ((bits >> 20) - (120 << 3)));
}

// A row of new numbers, as they are to be stored.
struct Row {
  const Array& from;
  const char* at;
  const float *cos, *sin;  // of its position, or nullptr
  int half;                // rotary_dim / 2
  bool interleaved;

  // Pairs are dimensions (2 i, 2 i + 1), or (i, i + half).
  __device__ __forceinline__ float operator()(int d) const {
    const float x = load_value(from, at, d);
    if (!cos || d >= 2 * half) return x;
    const bool second = interleaved ? d % 2 : d >= half;
    const int i = interleaved ? d / 2 : d - (second ? half : 0);
    const int step = interleaved ? 1 : half;
    const float other = load_value(from, at, second ? d - step : d + step);
    return second ? x * cos[i] + other * sin[i] : x * cos[i] - other * sin[i];
  }
};

// By one warp.  In 8 bits the largest magnitude becomes the largest number there is; a row with NaN
// or infinity in it has the scale NaN: it must not pass for a good one.
__device__ __forceinline__ void put(const Row& row, int n, const Array& cache, char* to,
                                    float* scale_to) {
  const int lane = threadIdx.x % 32;
  if (!scale_to) {
    for (int d = lane; d < n; d += 32) store_value(cache, to, d, row(d));
    return;
  }
  const bool whole = cache.dtype == DType::kInt8;
  float largest = 0, spoilt = 0;
  for (int d = lane; d < n; d += 32) {
    const float x = row(d);
    largest = fmaxf(largest, fabsf(x));
    spoilt += x * 0.f;
  }
  largest = max_lanes<32>(largest);
  spoilt = sum_lanes<32>(spoilt);
  const float scale = largest / (whole ? kLargestInt8 : kLargestFp8) + spoilt;
  for (int d = lane; d < n; d += 32) {
    const float x = scale > 0 ? row(d) / scale : 0.f;
    to[d * cache.column] = static_cast<char>(whole ? to_int8(x) : to_fp8(x));
  }
  if (lane == 0) *scale_to = scale;
}

__device__ __forceinline__ Row row_at(const AppendCall& p, const Array& from, const char* at,
                                      int position) {
  const int half = p.rotary_dim / 2;
  if (!p.cos) return {from, at, nullptr, nullptr, 0, false};
  ATTNKIT_REQUIRE(position < p.positions, "cos and sin have too few positions");
  const int64_t row = static_cast<int64_t>(position) * half;
  return {from, at, p.cos + row, p.sin + row, half, p.interleaved};
}

// One token of one head of a sequence: its key and its value.
__device__ __forceinline__ void append_token(const AppendCall& p, int b, int head, int t,
                                             int length) {
  const int slot = length + t, place = quotient(slot, p.by_page);
  int page = p.batch_index ? p.batch_index[b] : b;
  if (p.block_table) page = p.block_table[static_cast<int64_t>(b) * p.table_width + place];
  ATTNKIT_REQUIRE(0 <= page && page < p.pages,
                  "block_table or batch_index: the cache has no such page or row");
  const int at = slot - place * p.page_slots;
  const auto scale_of = [&](const Array& a) {
    return a.data ? reinterpret_cast<float*>(row_of(a, page, head, at)) : nullptr;
  };
  put(row_at(p, p.k, row_of(p.k, b, head, t), slot), p.head_dim, p.k_cache,
      row_of(p.k_cache, page, head, at), scale_of(p.k_scale));
  const Row value{p.v, row_of(p.v, b, head, t), nullptr, nullptr, 0, false};
  put(value, p.value_dim, p.v_cache, row_of(p.v_cache, page, head, at), scale_of(p.v_scale));
}

// By one warp: a token of one head, or behind all of these, a query that is to be rotated.
__global__ void __launch_bounds__(kTokens * 32) append_kernel(const AppendCall p) {
  int64_t item = static_cast<int64_t>(blockIdx.x) * kTokens + threadIdx.x / 32;
  const int64_t tokens = static_cast<int64_t>(p.batch) * p.heads * p.tokens;
  const bool is_query = item >= tokens;
  if (is_query) item -= tokens;
  const int each = is_query ? p.queries : p.tokens, heads = is_query ? p.q_heads : p.heads;
  if (is_query && item >= static_cast<int64_t>(p.batch) * heads * each) return;
  const int t = static_cast<int>(item % each);
  item /= each;
  const int head = static_cast<int>(item % heads), b = static_cast<int>(item / heads);
  const int length = p.lengths[b];
  ATTNKIT_REQUIRE(0 <= length && length <= p.capacity - p.tokens,
                  "lengths: a sequence has no room for its new tokens, the cache is full");
  if (is_query)
    put(row_at(p, p.q, row_of(p.q, b, head, t), length + t * p.query_step), p.head_dim, p.q_out,
        row_of(p.q_out, b, head, t), nullptr);
  else
    append_token(p, b, head, t, length);
}

}  // namespace

cudaError_t append(const AppendCall& p, cudaStream_t stream) {
  int64_t items = static_cast<int64_t>(p.batch) * p.heads * p.tokens;
  if (p.q_out.data) items += static_cast<int64_t>(p.batch) * p.q_heads * p.queries;
  if (items == 0) return cudaSuccess;
  return launch<append_kernel>((items + kTokens - 1) / kTokens, kTokens * 32, 0, stream, p);
}

}  // namespace attnkit::cuda
