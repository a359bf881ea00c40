// Which rows and keys a block works on, and how it gets the keys into shared memory.
#pragma once

#include "device.cuh"

namespace attnkit::cuda {

constexpr int kThreads = 128, kWarps = kThreads / 32;

// The slots [from, to) that a query sees, as far as band, start and length go.
struct Band {
  int from, to;
};

// Rows are (query, head) pairs that share a kv head: row r is query r / group, head r % group of
// it.
struct Work {
  int batch, kv_head, split;
  int first_row, rows;  // of the kv head
  int start, length;
  int origin;                // position of query 0
  int first_tile, end_tile;  // tiles of keys
  Band some, all;            // slots that some row, that all rows see

  __device__ __forceinline__ Band band(const DecodeParams& p, int query) const {
    const int position = origin + query;
    return {max(start, position - p.left), min(length, position + p.right + 1)};
  }
  __device__ __forceinline__ int64_t total_row(const DecodeParams& p, int row) const {
    return (static_cast<int64_t>(batch) * p.kv_heads + kv_head) * p.group * p.queries + first_row +
           row;
  }
};

template <int kTile>
__device__ __forceinline__ Work work_of_block(const DecodeParams& p) {
  Work w;
  int x = blockIdx.x;
  w.split = x % p.plan.splits, x /= p.plan.splits;
  const int row_tile = x % p.plan.row_tiles;
  x /= p.plan.row_tiles;
  w.kv_head = x % p.kv_heads, w.batch = x / p.kv_heads;
  w.first_row = row_tile * p.plan.row_tile;
  w.rows = min(p.plan.row_tile, p.group * p.queries - w.first_row);
  const int held = p.lengths ? p.lengths[w.batch] : p.capacity;
  ATTNKIT_REQUIRE(0 <= held && held <= p.capacity - p.added,
                  "lengths: a sequence has more tokens than the cache has slots for it");
  w.length = held + p.added;
  w.start = p.starts ? min(max(p.starts[w.batch], 0), w.length) : 0;
  w.origin = w.start;
  if (p.origin == Origin::kLastOfLength) w.origin = w.length - p.queries;
  if (p.origin == Origin::kLastOfCapacity) w.origin = p.capacity - p.queries;
  const Band first = w.band(p, w.first_row / p.group);
  const Band last = w.band(p, (w.first_row + w.rows - 1) / p.group);
  w.some = {first.from, last.to};
  w.all = {last.from, first.to};
  const int begin = w.some.from / kTile, end = (w.some.to + kTile - 1) / kTile;
  const int tiles = w.some.from < w.some.to ? end - begin : 0;
  const int each =
      max((tiles + p.plan.splits - 1) / p.plan.splits, max(p.plan.min_keys / kTile, 1));
  w.first_tile = begin + w.split * each;
  w.end_tile = min(begin + tiles, w.first_tile + each);
  return w;
}

// Rows of kDim values in shared memory.  Their pitch is an odd number of 16-byte units, so that the
// same unit of 8 rows lies in 8 different groups of banks: nothing that reads so has a conflict.
template <class Stored, int kDim>
struct Lines {
  static constexpr int kUnits = kDim * static_cast<int>(sizeof(Stored)) / 16;
  static constexpr int kPitch = (kUnits | 1) * 16;
  static_assert(kDim * sizeof(Stored) % 16 == 0 && kPitch / 16 % 2 == 1);
};

// Two tiles of keys and values, one that is used and one that is on its way.
template <class Stored, int kDim, int kValueDim, int kTile>
class Tiles {
 public:
  using Keys = Lines<Stored, kDim>;
  using Values = Lines<Stored, kValueDim>;
  static constexpr bool kScaled = sizeof(Stored) == 1;
  static constexpr int kPlaces = 4;  // tiles whose slots have been looked up; scales live as long
  static constexpr size_t kSharedBytes = shared_bytes<char>(2 * kTile * Keys::kPitch) +
                                         shared_bytes<char>(2 * kTile * Values::kPitch) +
                                         shared_bytes<int2>(kPlaces * kTile) +
                                         (kScaled ? 2 * shared_bytes<float>(kPlaces * kTile) : 0);

  __device__ __forceinline__ Tiles(const DecodeParams& p, const Work& w, Shared& shared)
      : p_(p), w_(w) {
    keys_ = shared.take<char>(2 * kTile * Keys::kPitch);
    values_ = shared.take<char>(2 * kTile * Values::kPitch);
    places_ = shared.take<int2>(kPlaces * kTile);
    if constexpr (kScaled) {
      key_scales_ = shared.take<float>(kPlaces * kTile);
      value_scales_ = shared.take<float>(kPlaces * kTile);
    }
    table_ =
        p.block_table ? p.block_table + static_cast<int64_t>(w.batch) * p.table_width : nullptr;
    row_ = p.batch_index ? p.batch_index[w.batch] : w.batch;
  }

  // Looks up where the keys of a tile lie: page and slot, or page -1 for one that no row sees.
  __device__ __forceinline__ void find(int tile) const {
    const int x = threadIdx.x;
    if (tile >= w_.end_tile || x >= kTile) return;
    const int slot = tile * kTile + x;
    int2 place = make_int2(-1, 0);
    const bool seen = slot >= w_.some.from && slot < w_.some.to &&
                      (!p_.keep || p_.keep[static_cast<int64_t>(w_.batch) * p_.capacity + slot]);
    if (seen) {
      const int page = quotient(slot, p_.by_page);
      place = make_int2(table_ ? table_[page] : row_, slot - page * p_.page_slots);
      ATTNKIT_REQUIRE(0 <= place.x && place.x < p_.pages,
                      "block_table or batch_index: the cache has no such page or row");
    }
    places_[tile % kPlaces * kTile + x] = place;
  }

  // Starts the copies of a tile that has been found; a key that no row sees becomes 0, whatever
  // lies in its slot.
  __device__ __forceinline__ void load(int tile) const {
    const int2* places = places_ + tile % kPlaces * kTile;
    copy<Keys>(p_.k, places, keys_ + tile % 2 * kTile * Keys::kPitch);
    copy<Values>(p_.v, places, values_ + tile % 2 * kTile * Values::kPitch);
    if constexpr (kScaled) {
      const int x = threadIdx.x % kTile, which = threadIdx.x / kTile;
      const Array& from = which ? p_.v_scale : p_.k_scale;
      float* to = (which ? value_scales_ : key_scales_) + tile % kPlaces * kTile + x;
      static_assert(kThreads >= 2 * kTile, "a thread brings one scale at most");
      const int2 place = places[x];
      if (which < 2) __pipeline_memcpy_async(to, row(from, place), 4, place.x < 0 ? 4 : 0);
    }
    __pipeline_commit();
  }

  __device__ __forceinline__ const char* keys(int tile) const {
    return keys_ + tile % 2 * kTile * Keys::kPitch;
  }
  __device__ __forceinline__ char* values(int tile) const {
    return values_ + tile % 2 * kTile * Values::kPitch;
  }
  __device__ __forceinline__ const float* key_scales(int tile) const {
    return key_scales_ + tile % kPlaces * kTile;
  }
  __device__ __forceinline__ const float* value_scales(int tile) const {
    return value_scales_ + tile % kPlaces * kTile;
  }
  __device__ __forceinline__ bool found(int tile, int x) const {
    return places_[tile % kPlaces * kTile + x].x >= 0;
  }
  // Whether some row does not see some key of the tile.
  __device__ __forceinline__ bool masked(int tile) const {
    return p_.keep || tile * kTile < w_.all.from || (tile + 1) * kTile > w_.all.to;
  }
  // The memory of the keys, for when no tile is left.
  __device__ __forceinline__ float* scratch() const { return reinterpret_cast<float*>(keys_); }

 private:
  __device__ __forceinline__ const char* row(const Array& a, int2 place) const {
    return row_of(a, place.x < 0 ? 0 : place.x, w_.kv_head, place.y);
  }
  template <class L>
  __device__ __forceinline__ void copy(const Array& a, const int2* places, char* to) const {
#pragma unroll 4
    for (int x = threadIdx.x; x < kTile * L::kUnits; x += kThreads) {
      const int key = x / L::kUnits, unit = x % L::kUnits;
      const int2 place = places[key];
      __pipeline_memcpy_async(to + key * L::kPitch + unit * 16, row(a, place) + unit * 16, 16,
                              place.x < 0 ? 16 : 0);
    }
  }

  const DecodeParams& p_;
  const Work& w_;
  char *keys_, *values_;
  int2* places_;
  float *key_scales_ = nullptr, *value_scales_ = nullptr;
  const int32_t* table_;
  int row_;
};

// Waits for this thread's copies, but for those of the newest tile if one is under way.
__device__ __forceinline__ void wait_for_all_but(bool one) {
  if (one)
    __pipeline_wait_prior(1);
  else
    __pipeline_wait_prior(0);
}

// What a row's scores go through on their way to exponents of 2.
struct Scores {
  float factor, softcap, cap_factor;  // score * factor, or softcap * tanh(score * cap_factor)

  __device__ __forceinline__ explicit Scores(const DecodeParams& p)
      : factor(p.scale * kLog2e),
        softcap(p.softcap * kLog2e),
        cap_factor(p.softcap > 0 ? p.scale / p.softcap : 0.f) {}

  __device__ __forceinline__ float operator()(float product) const {
    return softcap > 0 ? softcap * tanhf(product * cap_factor) : product * factor;
  }
};

// The ALiBi slope of a row, for exponents of 2.
__device__ __forceinline__ float slope_of(const DecodeParams& p, const Work& w, int head) {
  return p.alibi ? p.alibi[static_cast<int64_t>(w.batch) * p.alibi_batch + head] * kLog2e : 0.f;
}

// The end of a row: what its sum is divided by, with the sink's share, and its lse.
struct RowEnd {
  float weight, lse;
};
__device__ __forceinline__ RowEnd end_of_row(const DecodeParams& p, int head, float maximum,
                                             float sum) {
  float top = maximum;
  if (p.sinks) top = fmaxf(top, p.sinks[head] * kLog2e);
  const float pivot = pivot_of(top), shrink = exp2f(maximum - pivot);
  float total = sum * shrink;
  if (p.sinks) total += exp2f(p.sinks[head] * kLog2e - pivot);
  if (total == 0.f) return {0.f, -INFINITY};
  return {shrink / total, (pivot + log2f(total)) * kLn2};
}

// Writes two columns of a row of the block's result, or of its share of it.
__device__ __forceinline__ void write_out(const DecodeParams& p, const Work& w, int row, int column,
                                          float weight, float x, float y) {
  if (p.part_out) {
    float* to = p.part_out + (w.total_row(p, row) * p.plan.splits + w.split) * p.value_dim + column;
    *reinterpret_cast<float2*>(to) = make_float2(x, y);
    return;
  }
  const int r = w.first_row + row, head = w.kv_head * p.group + r % p.group;
  char* to = row_of(p.out, w.batch, head, r / p.group);
  // a row without any weight has only zeros, unless a hidden key were to spoil it
  store_value(p.out, to, column, weight == 0.f ? 0.f : x * weight);
  store_value(p.out, to, column + 1, weight == 0.f ? 0.f : y * weight);
}

// Writes what a row has beside its columns, and returns the weight of these.
__device__ __forceinline__ float write_sum(const DecodeParams& p, const Work& w, int row,
                                           float maximum, float sum, bool chosen) {
  if (p.part_out) {
    float* to = p.part_sum + (w.total_row(p, row) * p.plan.splits + w.split) * 2;
    if (chosen) *reinterpret_cast<float2*>(to) = make_float2(maximum, sum);
    return 1.f;
  }
  const int r = w.first_row + row, head = w.kv_head * p.group + r % p.group;
  const RowEnd end = end_of_row(p, head, maximum, sum);
  if (chosen)
    p.lse[(static_cast<int64_t>(w.batch) * p.q_heads + head) * p.queries + r / p.group] = end.lse;
  return end.weight;
}

// Where the rows of warps that had keys of their own are added up.
template <int kRows, int kValueDim>
struct Reduction {
  static constexpr int kPitch = kValueDim + 8;  // two columns of 4 rows fall into different banks
  static constexpr size_t kFloats = kRows * kPitch;
};

}  // namespace attnkit::cuda
