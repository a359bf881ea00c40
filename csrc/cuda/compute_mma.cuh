// Many rows: scores and outputs by tensor cores, 16 rows of a warp at a time.
//
// With few rows (kRowWarps 1) the four warps share the rows, each has a quarter of a tile's keys
// and a softmax of its own, and they are merged at the end; with many (kRowWarps 4) each warp has
// 16 rows and all keys.  Neither needs a barrier inside a tile.
#pragma once

#include "work.cuh"

namespace attnkit::cuda {

// T is the type of the products; keys and values are that, or 8-bit numbers that are widened to it.
template <class T, bool k8Bit, int kDim_, int kValueDim_, int kRowWarps>
class MmaCompute {
 public:
  static constexpr int kDim = kDim_, kValueDim = kValueDim_;
  // where a warp has all keys of a tile, their scores are to leave registers for wide outputs
  static constexpr int kTile = kRowWarps == 4 && kValueDim > 192 ? 32 : 64;
  static constexpr int kRows = 16 * kRowWarps;
  static constexpr bool kWidens = k8Bit;
  static constexpr int kBlocks = kRowWarps == 1 && kDim <= 64 ? 3 : 2;  // registers for so many
  using Stored = std::conditional_t<k8Bit, uint8_t, T>;
  using KVTiles = Tiles<Stored, kDim, kValueDim, kTile>;
  using Keys = Lines<T, kDim>;
  using Values = Lines<T, kValueDim>;
  using Sum = Reduction<16, kValueDim>;
  static constexpr bool kQueriesInRegisters = kDim <= 128;
  static constexpr size_t kSharedBytes =
      KVTiles::kSharedBytes +
      (k8Bit ? shared_bytes<char>(kTile * Keys::kPitch) + shared_bytes<char>(kTile * Values::kPitch)
             : 0) +
      (kQueriesInRegisters ? 0 : shared_bytes<char>(kRows * Keys::kPitch)) +
      (kRowWarps == 1 ? 2 * shared_bytes<float>(kWarps * 16) : 0);

  __device__ __forceinline__ MmaCompute(const DecodeParams& p, const Work& w, const KVTiles& tiles,
                                        Shared& shared)
      : p_(p), w_(w), tiles_(tiles), scores_(p) {
    if constexpr (k8Bit) {
      wide_keys_ = shared.take<char>(kTile * Keys::kPitch);
      wide_values_ = shared.take<char>(kTile * Values::kPitch);
    }
    if constexpr (!kQueriesInRegisters) queries_ = shared.take<char>(kRows * Keys::kPitch);
    if constexpr (kRowWarps == 1) {
      maxima_ = shared.take<float>(kWarps * 16);
      sums_ = shared.take<float>(kWarps * 16);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of_lane(h), r = w.first_row + min(row, w.rows - 1);
      const int query = r / p.group, head = w.kv_head * p.group + r % p.group;
      band_[h] = row < w.rows ? w.band(p, query) : Band{0, 0};
      slope_[h] = slope_of(p, w, head);
      position_[h] = w.origin + query;
      maximum_[h] = -INFINITY;
      sum_[h] = 0;
    }
    load_queries();
  }

  // Before `tile`, with a barrier before and after it: 8-bit keys and values become T.
  __device__ __forceinline__ void widen(int tile) {
    widen_lines<typename KVTiles::Keys, Keys>(tiles_.keys(tile), nullptr, wide_keys_);
    widen_lines<typename KVTiles::Values, Values>(tiles_.values(tile), tiles_.value_scales(tile),
                                                  wide_values_);
  }

  __device__ __forceinline__ void tile(int tile) {
    const char* keys = k8Bit ? wide_keys_ : tiles_.keys(tile);
    char* values = k8Bit ? wide_values_ : tiles_.values(tile);
    const bool masked = tiles_.masked(tile);
    if (masked) settle_values(tile, values);

    float s[kSteps][4] = {};  // [16 rows, 8 keys] each
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t a[4];
      if constexpr (kQueriesInRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = query_[d][i];
      } else {
        load_matrices<false>(a, queries_ + (row_warp() * 16 + lane() % 16) * Keys::kPitch + d * 32 +
                                    lane() / 16 * 16);
      }
#pragma unroll
      for (int n = 0; n < kSteps; n += 2) {
        uint32_t b[4];
        const int key = first_key() + n * 8 + lane() % 8 + lane() / 16 * 8;
        load_matrices<false>(b, keys + key * Keys::kPitch + d * 32 + lane() / 8 % 2 * 16);
        mma<T>(s[n], a, b[0], b[1]);
        mma<T>(s[n + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < kSteps; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = score(tile, n, i, s[n][i], masked);
#pragma unroll
    for (int h = 0; h < 2; ++h) soften(s, h);
    add_values(s, values);
  }

  // Merges the warps and writes the rows of the block.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int h = 0; h < 2; ++h) sum_[h] = sum_lanes<4>(sum_[h]);
    if constexpr (kRowWarps == 1) {
      merge_warps();
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = row_of_lane(h);
        if (row >= w_.rows) continue;
        const float weight = write_sum(p_, w_, row, maximum_[h], sum_[h], lane() % 4 == 0);
#pragma unroll
        for (int n = 0; n < kValueDim / 8; ++n)
          write_out(p_, w_, row, n * 8 + lane() % 4 * 2, weight, out_[n][2 * h],
                    out_[n][2 * h + 1]);
      }
    }
  }

 private:
  static constexpr int kKeyWarps = kWarps / kRowWarps;
  static constexpr int kSteps = kTile / kKeyWarps / 8;
  static_assert(kSteps % 2 == 0 && kDim % 16 == 0 && kValueDim % 16 == 0);

  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int row_warp() const { return kRowWarps == 1 ? 0 : warp(); }
  __device__ __forceinline__ int first_key() const { return kRowWarps == 1 ? warp() * 16 : 0; }
  __device__ __forceinline__ int row_of_lane(int h) const {
    return row_warp() * 16 + lane() / 4 + 8 * h;
  }

  __device__ __forceinline__ const char* query_row(int row) const {
    const int r = w_.first_row + row;
    return row_of(p_.q, w_.batch, w_.kv_head * p_.group + r % p_.group, r / p_.group);
  }

  __device__ __forceinline__ void load_queries() {
    if constexpr (kQueriesInRegisters) {
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = row_of_lane(i % 2), column = d * 16 + i / 2 * 8 + lane() % 4 * 2;
          query_[d][i] = 0;
          if (row < w_.rows)
            query_[d][i] = *reinterpret_cast<const uint32_t*>(query_row(row) + column * 2);
        }
    } else {  // read after the first barrier of the loop
      for (int x = threadIdx.x; x < kRows * Keys::kUnits; x += kThreads) {
        const int row = x / Keys::kUnits, unit = x % Keys::kUnits;
        uint4 bits = make_uint4(0, 0, 0, 0);
        if (row < w_.rows) bits = *reinterpret_cast<const uint4*>(query_row(row) + unit * 16);
        *reinterpret_cast<uint4*>(queries_ + row * Keys::kPitch + unit * 16) = bits;
      }
    }
  }

  // Keys are scaled as scores; values here, since what they are multiplied with is rounded to T.
  template <class From, class To>
  __device__ __forceinline__ void widen_lines(const char* from, const float* scales,
                                              char* to) const {
    const bool whole = p_.k.dtype == DType::kInt8;
    for (int x = threadIdx.x; x < kTile * From::kUnits * 2; x += kThreads) {
      const int key = x / (From::kUnits * 2), part = x % (From::kUnits * 2);
      const uint2 bytes = *reinterpret_cast<const uint2*>(from + key * From::kPitch + part * 8);
      const float scale = scales ? scales[key] : 1.f;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t two = (i < 2 ? bytes.x : bytes.y) >> 16 * (i % 2);
        const float low = whole ? from_int8(two) : from_fp8(two & 0xff);
        const float high = whole ? from_int8(two >> 8) : from_fp8(two >> 8 & 0xff);
        words[i] = pack<T>(low * scale, high * scale);
      }
      *reinterpret_cast<uint4*>(to + key * To::kPitch + part * 16) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  __device__ __forceinline__ bool visible(int tile, int key, int h) const {
    const int slot = tile * kTile + key;
    return slot >= band_[h].from && slot < band_[h].to && tiles_.found(tile, key);
  }

  __device__ __forceinline__ float score(int tile, int n, int i, float product, bool masked) const {
    const int key = first_key() + n * 8 + lane() % 4 * 2 + i % 2, h = i / 2;
    if constexpr (k8Bit) product *= tiles_.key_scales(tile)[key];
    float x = scores_(product);
    if (p_.alibi) x -= slope_[h] * static_cast<float>(abs(position_[h] - (tile * kTile + key)));
    return masked && !visible(tile, key, h) ? -INFINITY : x;
  }

  // Scores of rows h become weights, and what the rows had so far is scaled to the new maximum.
  __device__ __forceinline__ void soften(float (&s)[kSteps][4], int h) {
    float top = maximum_[h];
#pragma unroll
    for (int n = 0; n < kSteps; ++n) top = fmaxf(top, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
    top = max_lanes<4>(top);
    const float pivot = pivot_of(top);
    // 1 in place of 0 where nothing was before: what settle_values() put there has to stay
    const float shrink = maximum_[h] == -INFINITY ? 1.f : exp2f(maximum_[h] - pivot);
    maximum_[h] = top;
    sum_[h] *= shrink;
#pragma unroll
    for (int n = 0; n < kSteps; ++n)
#pragma unroll
      for (int i = 2 * h; i < 2 * h + 2; ++i) {
        s[n][i] = exp2f(s[n][i] - pivot);
        sum_[h] += s[n][i];
      }
#pragma unroll
    for (int n = 0; n < kValueDim / 8; ++n) {
      out_[n][2 * h] *= shrink;
      out_[n][2 * h + 1] *= shrink;
    }
  }

  __device__ __forceinline__ void add_values(const float (&s)[kSteps][4], const char* values) {
#pragma unroll
    for (int n = 0; n < kSteps; n += 2) {
      const uint32_t a[4] = {pack<T>(s[n][0], s[n][1]), pack<T>(s[n][2], s[n][3]),
                             pack<T>(s[n + 1][0], s[n + 1][1]), pack<T>(s[n + 1][2], s[n + 1][3])};
      const int key = first_key() + n * 8 + lane() % 16;
#pragma unroll
      for (int d = 0; d < kValueDim / 8; d += 2) {
        uint32_t b[4];
        load_matrices<true>(b, values + key * Values::kPitch + d * 16 + lane() / 16 * 16);
        mma<T>(out_[d], a, b[0], b[1]);
        mma<T>(out_[d + 1], a, b[2], b[3]);
      }
    }
  }

  // A weight of 0 does not silence NaN or infinity, so where one row sees a key that another does
  // not, such values are taken out of the tile and given to the rows that see them.
  __device__ __forceinline__ void settle_values(int tile, char* values) {
    bool found = false;
    for (int x = threadIdx.x; x < kTile * Values::kUnits * 4; x += kThreads)
      found |= wild(word(values, x / (Values::kUnits * 4), x % (Values::kUnits * 4)));
    if (!__syncthreads_or(found)) return;
    for (int key = first_key(); key < first_key() + kSteps * 8; ++key)
#pragma unroll
      for (int n = 0; n < kValueDim / 8; ++n) {
        const uint32_t bits = word(values, key, n * 4 + lane() % 4);
        if (!wild(bits)) continue;
        const float2 x = unpack<T>(bits);
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (visible(tile, key, h)) {
            if (!isfinite(x.x)) out_[n][2 * h] += x.x;
            if (!isfinite(x.y)) out_[n][2 * h + 1] += x.y;
          }
      }
    __syncthreads();
    for (int x = threadIdx.x; x < kTile * Values::kUnits * 4; x += kThreads) {
      uint32_t& bits = word(values, x / (Values::kUnits * 4), x % (Values::kUnits * 4));
      if (wild(bits & 0xffffu)) bits &= 0xffff0000u;
      if (wild(bits & 0xffff0000u)) bits &= 0xffffu;
    }
    __syncthreads();
  }
  __device__ __forceinline__ static uint32_t& word(char* values, int key, int n) {
    return *reinterpret_cast<uint32_t*>(values + key * Values::kPitch + n * 4);
  }
  // Whether one of two values is NaN or infinite.
  __device__ __forceinline__ static bool wild(uint32_t bits) {
    constexpr uint32_t kExponent = std::is_same_v<T, __nv_bfloat16> ? 0x7f80u : 0x7c00u;
    return (bits & kExponent) == kExponent || (bits >> 16 & kExponent) == kExponent;
  }

  // All warps have the same rows.  The memory of the keys is free by now.
  __device__ __forceinline__ void merge_warps() {
    static_assert(Sum::kFloats * sizeof(float) <= 2 * kTile * KVTiles::Keys::kPitch);
    float* total = tiles_.scratch();
    const int g = lane() / 4, t = lane() % 4;
    if (t == 0)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        maxima_[warp() * 16 + g + 8 * h] = maximum_[h];
        sums_[warp() * 16 + g + 8 * h] = sum_[h];
      }
    __syncthreads();
    float shrink[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) shrink[h] = exp2f(maximum_[h] - pivot_of(top_of(g + 8 * h)));
    for (int turn = 0; turn < kWarps; ++turn) {
      if (warp() == turn)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int n = 0; n < kValueDim / 8; ++n) {
            float* to = total + (g + 8 * h) * Sum::kPitch + n * 8 + 2 * t;
            float2 x = make_float2(0.f, 0.f);
            if (turn) x = *reinterpret_cast<const float2*>(to);
            x.x += out_[n][2 * h] * shrink[h];
            x.y += out_[n][2 * h + 1] * shrink[h];
            *reinterpret_cast<float2*>(to) = x;
          }
      __syncthreads();
    }
    for (int x = threadIdx.x; x < w_.rows * (kValueDim / 2); x += kThreads) {
      const int row = x / (kValueDim / 2), column = x % (kValueDim / 2) * 2;
      const float top = top_of(row), pivot = pivot_of(top);
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kWarps; ++i)
        sum += sums_[i * 16 + row] * exp2f(maxima_[i * 16 + row] - pivot);
      const float weight = write_sum(p_, w_, row, top, sum, column == 0);
      const float2 two = *reinterpret_cast<const float2*>(total + row * Sum::kPitch + column);
      write_out(p_, w_, row, column, weight, two.x, two.y);
    }
  }
  __device__ __forceinline__ float top_of(int row) const {
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) top = fmaxf(top, maxima_[i * 16 + row]);
    return top;
  }

  const DecodeParams& p_;
  const Work& w_;
  const KVTiles& tiles_;
  const Scores scores_;
  char *wide_keys_ = nullptr, *wide_values_ = nullptr, *queries_ = nullptr;
  float *maxima_ = nullptr, *sums_ = nullptr;
  uint32_t query_[kQueriesInRegisters ? kDim / 16 : 1][4];
  float out_[kValueDim / 8][4] = {};
  Band band_[2];
  float slope_[2], maximum_[2], sum_[2];
  int position_[2];
};

}  // namespace attnkit::cuda
