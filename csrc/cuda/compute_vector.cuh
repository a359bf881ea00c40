// Few rows, or float32: dot products and sums in float32 without tensor cores.
//
// Each warp has a quarter of a tile's keys and a softmax of its own.  For the scores every lane has
// a key, or an interleaved part of one; for the output every lane has columns.
#pragma once

#include "work.cuh"

namespace attnkit::cuda {

// Stored numbers as floats: the i-th four of 16 bytes, and two neighbours of a row.
template <class Stored>
struct Numbers {  // bf16 and fp16
  __device__ __forceinline__ static float4 four(uint4 bits, int i, bool) {
    const float2 a = unpack<Stored>(i ? bits.z : bits.x), b = unpack<Stored>(i ? bits.w : bits.y);
    return make_float4(a.x, a.y, b.x, b.y);
  }
  __device__ __forceinline__ static float2 two(const char* p, bool) {
    return unpack<Stored>(*reinterpret_cast<const uint32_t*>(p));
  }
};
template <>
struct Numbers<float> {
  __device__ __forceinline__ static float4 four(uint4 bits, int, bool) {
    return make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                       __uint_as_float(bits.w));
  }
  __device__ __forceinline__ static float2 two(const char* p, bool) {
    return *reinterpret_cast<const float2*>(p);
  }
};
template <>
struct Numbers<uint8_t> {  // int8 (whole) or float8_e4m3fn
  __device__ __forceinline__ static float one(uint32_t bits, bool whole) {
    return whole ? from_int8(bits) : from_fp8(bits & 0xff);
  }
  __device__ __forceinline__ static float4 four(uint4 bits, int i, bool whole) {
    const uint32_t word = i == 0 ? bits.x : i == 1 ? bits.y : i == 2 ? bits.z : bits.w;
    return make_float4(one(word, whole), one(word >> 8, whole), one(word >> 16, whole),
                       one(word >> 24, whole));
  }
  __device__ __forceinline__ static float2 two(const char* p, bool whole) {
    const uint32_t bits = *reinterpret_cast<const uint16_t*>(p);
    return make_float2(one(bits, whole), one(bits >> 8, whole));
  }
};

template <class Stored_, int kRows_, int kDim_, int kValueDim_>
class VectorCompute {
 public:
  using Stored = Stored_;
  static constexpr int kRows = kRows_, kDim = kDim_, kValueDim = kValueDim_;
  static constexpr bool kWidens = false;
  // registers for so many: few bytes a tile ask for many tiles on their way
  static constexpr int kBlocks =
      kDim <= 64 ? (sizeof(Stored) == 1 ? 4 : 3) : (sizeof(Stored) == 1 && kDim <= 96 ? 3 : 2);
  // two stages of float32 tiles are to leave room for a second block
  static constexpr int kTile = sizeof(Stored) == 4 && kDim > 64 ? 32 : 64;
  using KVTiles = Tiles<Stored, kDim, kValueDim, kTile>;
  using Sum = Reduction<kRows, kValueDim>;
  static constexpr size_t kSharedBytes = KVTiles::kSharedBytes + shared_bytes<float>(kRows * kDim) +
                                         shared_bytes<float>(kRows * kTile) +
                                         2 * shared_bytes<float>(kWarps * kRows);

  __device__ __forceinline__ VectorCompute(const DecodeParams& p, const Work& w,
                                           const KVTiles& tiles, Shared& shared)
      : p_(p), w_(w), tiles_(tiles), scores_(p) {
    queries_ = shared.take<float>(kRows * kDim);
    weights_ = shared.take<float>(kRows * kTile);
    maxima_ = shared.take<float>(kWarps * kRows);
    sums_ = shared.take<float>(kWarps * kRows);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = w.first_row + min(r, w.rows - 1), query = row / p.group;
      band_[r] = r < w.rows ? w.band(p, query) : Band{0, 0};
      slope_[r] = slope_of(p, w, w.kv_head * p.group + row % p.group);
      position_[r] = w.origin + query;
      maximum_[r] = -INFINITY;
      sum_[r] = 0;
    }
    for (int x = threadIdx.x; x < kRows * kDim; x += kThreads) {  // read after the loop's barrier
      const int row = x / kDim, r = w.first_row + row;
      float value = 0;
      if (row < w.rows)
        value = load_value(
            p.q, row_of(p.q, w.batch, w.kv_head * p.group + r % p.group, r / p.group), x % kDim);
      queries_[x] = value;
    }
  }

  __device__ __forceinline__ void tile(int tile) {
    const bool masked = tiles_.masked(tile), whole = p_.k.dtype == DType::kInt8;
    const int key = first_key() + lane() % kKeys, slot = tile * kTile + key;
    float s[kRows] = {};
    const char* line = tiles_.keys(tile) + key * Keys::kPitch;
    // the lanes of one key take turns at its 16-byte units
#pragma unroll
    for (int unit = lane() / kKeys; unit < Keys::kUnits; unit += 32 / kKeys) {
      const uint4 bits = *reinterpret_cast<const uint4*>(line + unit * 16);
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        const float4 k = Numbers<Stored>::four(bits, i, whole);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float4 q =
              *reinterpret_cast<const float4*>(queries_ + r * kDim + (unit * kFours + i) * 4);
          s[r] = fmaf(q.x, k.x, s[r]), s[r] = fmaf(q.y, k.y, s[r]);
          s[r] = fmaf(q.z, k.z, s[r]), s[r] = fmaf(q.w, k.w, s[r]);
        }
      }
    }
    unsigned seen[kRows];  // keys of this warp, by row
    const bool there = !masked || tiles_.found(tile, key);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int o = kKeys; o < 32; o *= 2) s[r] += __shfl_xor_sync(kAllLanes, s[r], o);
      if constexpr (KVTiles::kScaled) s[r] *= tiles_.key_scales(tile)[key];
      float x = scores_(s[r]);
      if (p_.alibi) x -= slope_[r] * static_cast<float>(abs(position_[r] - slot));
      const bool visible = !masked || (there && slot >= band_[r].from && slot < band_[r].to);
      seen[r] = masked ? __ballot_sync(kAllLanes, visible) : kAllLanes;
      if (!visible) x = -INFINITY;

      const float top = fmaxf(maximum_[r], max_lanes<kKeys>(x)), pivot = pivot_of(top);
      const float shrink = exp2f(maximum_[r] - pivot), weight = exp2f(x - pivot);
      maximum_[r] = top;
      sum_[r] = sum_[r] * shrink + weight;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) out_[r][c].x *= shrink, out_[r][c].y *= shrink;
      float given = weight;
      if constexpr (KVTiles::kScaled) given *= tiles_.value_scales(tile)[key];
      if (lane() < kKeys) weights_[r * kTile + key] = given;
    }
    __syncwarp();
    const bool split = masked;  // rows may see different keys
#pragma unroll kUnroll
    for (int x = 0; x < kKeys; ++x) {
      const char* values = tiles_.values(tile) + (first_key() + x) * Values::kPitch;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int column = c * 64 + lane() * 2;
        if (kValueDim % 64 && column >= kValueDim) continue;
        const float2 v =
            Numbers<Stored>::two(values + column * static_cast<int>(sizeof(Stored)), whole);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (split && !(seen[r] >> x & 1)) continue;
          const float weight = weights_[r * kTile + first_key() + x];
          out_[r][c].x = fmaf(weight, v.x, out_[r][c].x);
          out_[r][c].y = fmaf(weight, v.y, out_[r][c].y);
        }
      }
    }
  }

  // Merges the warps and writes the rows of the block.
  __device__ __forceinline__ void finish() {
    static_assert(Sum::kFloats * sizeof(float) <= 2 * kTile * Keys::kPitch);
    float* total = tiles_.scratch();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sum_[r] = sum_lanes<kKeys>(sum_[r]);
      if (lane() == 0)
        maxima_[warp() * kRows + r] = maximum_[r], sums_[warp() * kRows + r] = sum_[r];
    }
    __syncthreads();
    for (int turn = 0; turn < kWarps; ++turn) {
      if (warp() == turn)
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float shrink = exp2f(maximum_[r] - pivot_of(top_of(r)));
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            const int column = c * 64 + lane() * 2;
            if (kValueDim % 64 && column >= kValueDim) continue;
            float2* to = reinterpret_cast<float2*>(total + r * Sum::kPitch + column);
            float2 x = turn ? *to : make_float2(0.f, 0.f);
            x.x = fmaf(out_[r][c].x, shrink, x.x), x.y = fmaf(out_[r][c].y, shrink, x.y);
            *to = x;
          }
        }
      __syncthreads();
    }
    for (int x = threadIdx.x; x < w_.rows * (kValueDim / 2); x += kThreads) {
      const int row = x / (kValueDim / 2), column = x % (kValueDim / 2) * 2;
      const float top = top_of(row), pivot = pivot_of(top);
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kWarps; ++i)
        sum += sums_[i * kRows + row] * exp2f(maxima_[i * kRows + row] - pivot);
      const float weight = write_sum(p_, w_, row, top, sum, column == 0);
      const float2 two = *reinterpret_cast<const float2*>(total + row * Sum::kPitch + column);
      write_out(p_, w_, row, column, weight, two.x, two.y);
    }
  }

 private:
  using Keys = typename KVTiles::Keys;
  using Values = typename KVTiles::Values;
  static constexpr int kKeys = kTile / kWarps;
  static constexpr int kFours = 4 / static_cast<int>(sizeof(Stored));  // of 16 bytes
  static constexpr int kColumns = (kValueDim + 63) / 64;
  static constexpr int kUnroll = sizeof(Stored) == 1 ? 2 : 4;  // values under way; or they spill

  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int first_key() const { return warp() * kKeys; }
  __device__ __forceinline__ float top_of(int row) const {
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) top = fmaxf(top, maxima_[i * kRows + row]);
    return top;
  }

  const DecodeParams& p_;
  const Work& w_;
  const KVTiles& tiles_;
  const Scores scores_;
  float *queries_, *weights_, *maxima_, *sums_;
  float2 out_[kRows][kColumns] = {};
  Band band_[kRows];
  float slope_[kRows], maximum_[kRows], sum_[kRows];
  int position_[kRows];
};

}  // namespace attnkit::cuda
