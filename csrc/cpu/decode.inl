// A few queries over many keys: the same mathematics as forward.inl for when packing the keys would
// cost more than using them.
//
// Keys are read once, where they lie, be that in pages all over a cache.  All rows that share a kv
// head (the queries of the group's heads) meet each key together.  The keys are split into chunks
// of kDecodeChunk, counted from key 0, each with its own maximum, sum and output; a second pass
// merges the chunks in their order.  So the bits depend on no thread and no batch.

constexpr int64_t kDecodeChunk = 4 * kBlock;

// Values of a row as they lie in memory, one vector at a time.
struct FromFloat32 {
  using T = float;
  using Stored = float;
  static ATTNKIT_INLINE Vec<float> get(const float* p) { return load(p); }
  static ATTNKIT_INLINE float one(const float* p) { return *p; }
};
struct FromBf16 {
  using T = float;
  using Stored = uint16_t;
  static ATTNKIT_INLINE Vec<float> get(const uint16_t* p) { return load_bf16(p); }
  static ATTNKIT_INLINE float one(const uint16_t* p) { return from_bf16(*p); }
};
struct FromFp16 {
  using T = float;
  using Stored = uint16_t;
  static ATTNKIT_INLINE Vec<float> get(const uint16_t* p) { return load_fp16(p); }
  static ATTNKIT_INLINE float one(const uint16_t* p) { return from_fp16(*p); }
};
struct FromFloat64 {
  using T = double;
  using Stored = double;
  static ATTNKIT_INLINE Vec<double> get(const double* p) { return load(p); }
  static ATTNKIT_INLINE double one(const double* p) { return *p; }
};
// These are to be multiplied with a scale per token and head.
struct FromInt8 {
  using T = float;
  using Stored = int8_t;
  static ATTNKIT_INLINE Vec<float> get(const int8_t* p) { return load_int8(p); }
  static ATTNKIT_INLINE float one(const int8_t* p) { return *p; }
};
struct FromFp8 {
  using T = float;
  using Stored = uint8_t;
  static ATTNKIT_INLINE Vec<float> get(const uint8_t* p) { return load_fp8(p); }
  static ATTNKIT_INLINE float one(const uint8_t* p) { return from_fp8(*p); }
};

template <class From>
class Decode {
  using T = typename From::T;
  using Stored = typename From::Stored;
  static constexpr bool kScaled = sizeof(Stored) == 1;
  static constexpr int kMaxRows = 4;                  // rows that meet a key at once
  static constexpr int kAccumulators = 4 * kColumns;  // registers for one product
  static constexpr int64_t kAheadBytes = 4096;        // of the rows being fetched

 public:
  Decode(const AttentionParams& p, const Team& team)
      : p_(p),
        team_(team),
        group_(p.q_heads / greater<int64_t>(p.kv_heads, 1)),
        rows_(group_ * p.max_lq),
        q_ld_(ceil_to(p.head_dim, kLanes<T>)),
        o_ld_(ceil_to(p.value_dim, kLanes<T>)),
        ahead_(lesser(kAheadBytes / greater<int64_t>(p.head_dim * sizeof(Stored), 1), kBlock)) {}

  void run() {
    if (rows_ == 0) return;
    const int64_t heads = p_.sequences * p_.kv_heads;
    const int64_t chunks = greater<int64_t>(1, (p_.max_lk + kDecodeChunk - 1) / kDecodeChunk);
    const int64_t items = heads * chunks;
    // there may be more rows to merge than chunks to read
    const int workers =
        static_cast<int>(lesser<int64_t>(team_.threads, greater(items, heads * rows_)));
    Part* parts = nullptr;
    T* sums = nullptr;
    auto* scratch = static_cast<Scratch*>(__builtin_alloca(workers * sizeof(Scratch)));
    Workspace workspace([&](Workspace& w) {
      key_labels_.layout(w, p_.packed_keys, p_.keep, p_.k_segments);
      query_labels_.layout(w, p_.packed_rows, false, p_.q_segments);
      w.take(parts, items * rows_);
      w.take(sums, items * rows_ * o_ld_);
      for (int i = 0; i < workers; ++i) {
        Scratch& t = scratch[i];
        w.take(t.q, rows_ * q_ld_);
        w.take(t.s, kMaxRows * kBlock);
        w.take(t.bias, kBlock);
        w.take(t.line, o_ld_);
      }
    });
    fill_labels(p_, team_, key_labels_, query_labels_);
    for_each(team_, items, [&](int64_t item, int worker) {
      const int64_t c = item % chunks, kv = item / chunks % p_.kv_heads;
      chunk(item / chunks / p_.kv_heads, kv, c, parts + item * rows_, sums + item * rows_ * o_ld_,
            scratch[worker]);
    });
    for_each(team_, heads * rows_, [&](int64_t item, int worker) {
      const int64_t row = item % rows_, head = item / rows_;
      merge(head / p_.kv_heads, head % p_.kv_heads, row, parts + head * chunks * rows_ + row,
            sums + (head * chunks * rows_ + row) * o_ld_, chunks, scratch[worker].line);
    });
  }

 private:
  struct Part {
    T m, l;
  };
  struct Scratch {
    T* q;     // [rows][q_ld]
    T* s;     // [kMaxRows][kBlock]
    T* bias;  // [kBlock]
    T* line;  // [o_ld]
  };
  // The n keys of a block from `first` on: where they and their values lie, and their scales, 0
  // past the last key.
  struct Places {
    int64_t first, n;
    const Stored* k[kBlock];
    const Stored* v[kBlock];
    T k_scale[kBlock], v_scale[kBlock];
  };

  // Row r of a kv head is query r % max_lq of head kv * group + r / max_lq.
  int64_t head_of(int64_t kv, int64_t row) const { return kv * group_ + row / p_.max_lq; }
  int64_t query_of(int64_t row) const { return row % p_.max_lq; }

  void chunk(int64_t sequence, int64_t kv, int64_t c, Part* parts, T* sums, Scratch& t) {
    const Sequence& s = p_.sequence[sequence];
    for (int64_t r = 0; r < rows_; ++r) parts[r] = {-kInfinity<T>, T{0}};
    for (int64_t x = 0; x < rows_ * o_ld_; ++x) sums[x] = 0;
    const Labels<T> key_labels = key_labels_.from(s.key_pad);
    const Labels<T> query_labels = query_labels_.from(s.row_pad);
    const Head<T> some(p_, sequence, kv * group_, key_labels, query_labels);
    const int64_t begin = greater(c * kDecodeChunk, some.first_key(0));
    const int64_t end = lesser((c + 1) * kDecodeChunk, some.last_key(s.lq));
    if (begin >= end) return;

    const Rows q{&p_.q, s.entry, 0, s.q0, 1, p_.head_dim};
    for (int64_t r = 0; r < rows_; ++r) {
      Rows one = q;
      one.head = head_of(kv, r);
      one.first += query_of(r);
      fetch_row<Plain<T>>(one, 0, q_ld_, static_cast<T>(p_.scale), t.q + r * q_ld_);
    }
    // The keys of the next block are found early, to be fetched while this one is worked on.
    const auto find_visible = [&](int64_t j, Places& at) {
      while (j < end && !some.any(0, s.lq, j / kBlock)) j = floor_to(j, kBlock) + kBlock;
      find(sequence, kv, j, greater<int64_t>(lesser(end, floor_to(j, kBlock) + kBlock) - j, 0), at);
    };
    Places two[2];
    find_visible(begin, two[0]);
    for (int now = 0; two[now].n > 0; now = 1 - now) {
      const Places& at = two[now];
      const Places* next = &two[1 - now];
      find_visible(at.first + at.n, two[1 - now]);
      for (int64_t r = 0; r < rows_; next = nullptr) {
        if (rows_ - r >= 4)
          rows<4>(sequence, kv, at, next, r, parts, sums, t), r += 4;
        else if (rows_ - r >= 2)
          rows<2>(sequence, kv, at, next, r, parts, sums, t), r += 2;
        else
          rows<1>(sequence, kv, at, next, r, parts, sums, t), r += 1;
      }
    }
  }

  // The n keys from j on.  Only this knows of pages: what is done with a block does not depend on
  // where it lies.
  void find(int64_t sequence, int64_t kv, int64_t j, int64_t n, Places& at) const {
    at.first = j, at.n = n;
    const int64_t size = p_.pages.rows;
    const int32_t* table = p_.pages.table + sequence * p_.pages.width;
    for (int64_t x = 0; x < n;) {
      const int64_t slot = p_.sequence[sequence].k0 + j + x;
      const int64_t page = table[slot / size], stop = lesser(n, x + size - slot % size);
      int64_t row = slot % size;
      auto* k = reinterpret_cast<const Stored*>(row_of(p_.k, page, kv, row));
      auto* v = reinterpret_cast<const Stored*>(row_of(p_.v, page, kv, row));
      for (; x < stop; ++x, ++row, k += p_.k.row, v += p_.v.row) {
        at.k[x] = k;
        at.v[x] = v;
        if constexpr (kScaled) {
          __builtin_memcpy(&at.k_scale[x], row_of(p_.k_scale, page, kv, row), sizeof(float));
          __builtin_memcpy(&at.v_scale[x], row_of(p_.v_scale, page, kv, row), sizeof(float));
        }
      }
    }
    if constexpr (kScaled)
      for (int64_t x = n; x < kBlock; ++x) at.k_scale[x] = at.v_scale[x] = 0;
  }

  // M rows from r on against the keys of one block.  The first rows to meet them, which are given
  // the `next` block, fetch: values while the scores are made, then the next keys.
  template <int M>
  void rows(int64_t sequence, int64_t kv, const Places& at, const Places* next, int64_t r,
            Part* parts, T* sums, Scratch& t) {
    const Sequence& s = p_.sequence[sequence];
    const int64_t j = at.first, n = at.n, stop = j + n, padded = ceil_to(n, kLanes<T>);
    scores<M>(at, next, t.q + r * q_ld_, t.s);
    const Labels<T> key_labels = key_labels_.from(s.key_pad);
    const Labels<T> query_labels = query_labels_.from(s.row_pad);
    bool plain = true;
    for (int m = 0; m < M; ++m) {
      const int64_t i = query_of(r + m);
      const Head<T> head(p_, sequence, head_of(kv, r + m), key_labels, query_labels);
      T* score = t.s + m * kBlock;
      if constexpr (kScaled) multiply(at.k_scale, n, score);
      for (int64_t x = n; x < padded; ++x) score[x] = -kInfinity<T>;
      if (head.plain(i, i + 1, j, stop)) continue;
      plain = false;
      // labels and bias are looked up per key of a block, and j may be inside one
      head.row(i, j, padded, score, t.bias);
      for (int64_t x = n; x < padded; ++x) score[x] = -kInfinity<T>;
    }
    uint64_t visible[M];
    bool careful = !plain && !finite_values(at, n);
    for (int m = 0; m < M; ++m) {
      T* score = t.s + m * kBlock;
      visible[m] = 0;
      if (careful)
        for (int64_t x = 0; x < n; ++x)
          visible[m] |= static_cast<uint64_t>(score[x] != -kInfinity<T>) << x;
      softmax(score, padded, parts[r + m], sums + (r + m) * o_ld_);
      if constexpr (kScaled) multiply(at.v_scale, n, score);
    }
    if (careful) {
      for (int m = 0; m < M; ++m)
        for (int64_t x = 0; x < n; ++x)
          if (visible[m] >> x & 1)
            for (int64_t d = 0; d < p_.value_dim; ++d)
              sums[(r + m) * o_ld_ + d] += t.s[m * kBlock + x] * From::one(at.v[x] + d);
      return;
    }
    add_values<M>(at, next, t.s, sums + r * o_ld_);
  }

  // The rows of memory in the order of their use are the keys of a block, its values, and the keys
  // of the next one.  Fetches what will be used ahead_ rows after row `x`.
  ATTNKIT_INLINE void fetch_ahead(const Places& at, const Places& next, int64_t x) const {
    x += ahead_;
    const Stored* row = nullptr;
    int64_t width = p_.head_dim;
    if (x < at.n)
      row = at.k[x];
    else if (x < 2 * at.n)
      row = at.v[x - at.n], width = p_.value_dim;
    else if (x < 2 * at.n + next.n)
      row = next.k[x - 2 * at.n];
    else
      return;
    const char* bytes = reinterpret_cast<const char*>(row);
    for (int64_t b = 0; b < width * static_cast<int64_t>(sizeof(Stored)); b += 64)
      __builtin_prefetch(bytes + b);
  }

  static void multiply(const T* scale, int64_t n, T* to) {
    for (int64_t x = 0; x < n; x += kLanes<T>) store(to + x, load(to + x) * load(scale + x));
  }

  // s[M][kBlock] = q k^T for the keys of a block: kLanes dot products at a time, one per
  // accumulator, summed across lanes all together.
  template <int M>
  void scores(const Places& at, const Places* next, const T* q, T* to) {
    const int64_t n = at.n;
    constexpr int kRowsHere = M <= kLanes<T> ? M : kLanes<T>;
    constexpr int kKeys = kLanes<T> / kRowsHere;
    const int64_t whole = floor_to(p_.head_dim, kLanes<T>), rest = p_.head_dim - whole;
    for (int first = 0; first < M; first += kRowsHere)
      for (int64_t x = 0; x < n; x += kKeys) {
        const Stored* k[kKeys];
        for (int y = 0; y < kKeys; ++y) k[y] = at.k[lesser(x + y, n - 1)];
        if (next && first == 0)
          for (int64_t y = x; y < lesser(x + kKeys, n); ++y) fetch_ahead(at, *next, y);
        Vec<T> c[kRowsHere][kKeys];
#pragma GCC unroll 16
        for (int m = 0; m < kRowsHere; ++m)
#pragma GCC unroll 16
          for (int y = 0; y < kKeys; ++y) c[m][y] = Vec<T>{};
        for (int64_t d = 0; d < whole; d += kLanes<T>) {
          // one key after the other: all of them beside their sums are more than the registers
          Vec<T> qv[kRowsHere];
#pragma GCC unroll 16
          for (int m = 0; m < kRowsHere; ++m) qv[m] = load(q + (first + m) * q_ld_ + d);
#pragma GCC unroll 16
          for (int y = 0; y < kKeys; ++y) {
            const Vec<T> key = From::get(k[y] + d);
#pragma GCC unroll 16
            for (int m = 0; m < kRowsHere; ++m) c[m][y] += qv[m] * key;
          }
        }
        if (rest)
          for (int y = 0; y < kKeys; ++y) {
            Stored tail[kLanes<T>] = {};
            __builtin_memcpy(tail, k[y] + whole, rest * sizeof(Stored));
            for (int m = 0; m < kRowsHere; ++m)
              c[m][y] += load(q + (first + m) * q_ld_ + whole) * From::get(tail);
          }
        Vec<T> dots[kLanes<T>];
#pragma GCC unroll 16
        for (int a = 0; a < kLanes<T>; ++a) dots[a] = c[a / kKeys][a % kKeys];
        T lane[kLanes<T>];
        store(lane, sums_of<T>(dots));
        for (int m = 0; m < kRowsHere; ++m)  // lanes past the last key are hidden later
          __builtin_memcpy(to + (first + m) * kBlock + x, lane + m * kKeys, kKeys * sizeof(T));
      }
  }

  bool finite_values(const Places& at, int64_t n) const {
    const int64_t whole = floor_to(p_.value_dim, kLanes<T>);
    Vec<T> sum{};
    T rest = 0;
    for (int64_t x = 0; x < n; ++x) {
      const Stored* v = at.v[x];
      for (int64_t d = 0; d < whole; d += kLanes<T>) sum += From::get(v + d) * T{0};
      for (int64_t d = whole; d < p_.value_dim; ++d) rest += From::one(v + d) * T{0};
      if constexpr (kScaled) rest += at.v_scale[x] * T{0};
    }
    return sum_lanes<T>(sum) + rest == T{0};
  }

  void softmax(T* s, int64_t n, Part& part, T* sums) {
    Vec<T> best = splat(-kInfinity<T>);
    for (int64_t x = 0; x < n; x += kLanes<T>) best = vmax<T>(load(s + x), best);
    const T m = greater(part.m, max_lanes<T>(best));
    const T pivot = m == -kInfinity<T> ? T{0} : m;
    if (m > part.m) {
      const Vec<T> shrink = exp2(splat((part.m - m) * kLog2e<T>));
      part.l *= shrink[0];
      part.m = m;
      for (int64_t d = 0; d < o_ld_; d += kLanes<T>) store(sums + d, load(sums + d) * shrink);
    }
    Vec<T> sum{};
    for (int64_t x = 0; x < n; x += kLanes<T>) {
      const Vec<T> w = exp2((load(s + x) - pivot) * kLog2e<T>);
      sum += w;
      store(s + x, w);
    }
    part.l += sum_lanes<T>(sum);
  }

  // o[M][value_dim] += w v over the keys of a block, as many columns at a time as registers allow.
  template <int M>
  void add_values(const Places& at, const Places* next, const T* w, T* o) {
    const int64_t n = at.n, whole = floor_to(p_.value_dim, kLanes<T>);
    int64_t d = columns_from<M, kAccumulators / M>(at, next, w, o, 0, whole);
    for (; d < p_.value_dim; ++d)
      for (int64_t x = 0; x < n; ++x)
        for (int m = 0; m < M; ++m) o[m * o_ld_ + d] += w[m * kBlock + x] * From::one(at.v[x] + d);
  }

  template <int M, int N>
  ATTNKIT_INLINE int64_t columns_from(const Places& at, const Places* next, const T* w, T* o,
                                      int64_t d, int64_t whole) {
    for (; d + N * kLanes<T> <= whole; d += N * kLanes<T>)
      columns<M, N>(at, d ? nullptr : next, w, o, d);
    if constexpr (N > 1) return columns_from<M, N / 2>(at, next, w, o, d, whole);
    return d;
  }

  // Few sums would wait for each other: then each is kept in several, of every kWays-th key.
  template <int M, int N>
  ATTNKIT_INLINE void columns(const Places& at, const Places* next, const T* w, T* o, int64_t d) {
    constexpr int kWays = M * N >= 8 ? 1 : lesser(8 / (M * N), 4);
    Vec<T> c[kWays][M][N];
#pragma GCC unroll 4
    for (int way = 1; way < kWays; ++way) clear<M, N, T>(c[way]);
    load_tile<M, N, T>(o + d, o_ld_, c[0]);
    const int64_t n = at.n;
    int64_t x = 0;
    for (; x + kWays <= n; x += kWays) {
      if (next)
        for (int way = 0; way < kWays; ++way) fetch_ahead(at, *next, n + x + way);
#pragma GCC unroll 4
      for (int way = 0; way < kWays; ++way) add_key<M, N>(at.v[x + way] + d, w + x + way, c[way]);
    }
    for (; x < n; ++x) add_key<M, N>(at.v[x] + d, w + x, c[0]);
#pragma GCC unroll 4
    for (int way = 1; way < kWays; ++way)
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int y = 0; y < N; ++y) c[0][m][y] += c[way][m][y];
    store_tile<M, N, T>(o + d, o_ld_, c[0]);
  }

  template <int M, int N>
  static ATTNKIT_INLINE void add_key(const Stored* v, const T* w, Vec<T> (&c)[M][N]) {
    // one value after the other: all of them beside their sums are more than the registers
    Vec<T> weight[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) weight[m] = splat(w[m * kBlock]);
#pragma GCC unroll 16
    for (int y = 0; y < N; ++y) {
      const Vec<T> value = From::get(v + y * kLanes<T>);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) c[m][y] += weight[m] * value;
    }
  }

  // One row: its chunks in order.
  void merge(int64_t sequence, int64_t kv, int64_t row, const Part* parts, const T* sums,
             int64_t chunks, T* line) {
    const Sequence& s = p_.sequence[sequence];
    const int64_t h = head_of(kv, row), i = query_of(row);
    T m = p_.sinks ? static_cast<T>(p_.sinks[h]) : -kInfinity<T>;
    const T sink = m;
    for (int64_t c = 0; c < chunks; ++c) m = greater(m, parts[c * rows_].m);
    const T pivot = m == -kInfinity<T> ? T{0} : m;
    T l = exp2(splat((sink - pivot) * kLog2e<T>))[0];
    for (int64_t d = 0; d < o_ld_; ++d) line[d] = 0;
    for (int64_t c = 0; c < chunks; ++c) {
      const Part part = parts[c * rows_];
      if (part.l == 0) continue;
      const Vec<T> weight = exp2(splat((part.m - pivot) * kLog2e<T>));
      l += weight[0] * part.l;
      const T* o = sums + c * rows_ * o_ld_;
      for (int64_t d = 0; d < o_ld_; d += kLanes<T>)
        store(line + d, load(line + d) + weight * load(o + d));
    }
    store_row(line, p_.value_dim, l == 0 ? T{0} : 1 / l,
              mutable_row_of(p_.out, s.entry, h, s.q0 + i), p_.out.dtype, p_.out.column);
    T* lse = static_cast<T*>(p_.lse) + (s.entry * p_.q_heads + h) * p_.q_rows + s.q0 + i;
    *lse = l == 0 ? -kInfinity<T> : pivot + static_cast<T>(log_of(l));
  }

  const AttentionParams& p_;
  const Team& team_;
  int64_t group_, rows_, q_ld_, o_ld_, ahead_;
  Labels<T> key_labels_, query_labels_;
};
