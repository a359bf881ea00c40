// out = softmax(scale * q k^T + mask) v;  lse = logsumexp of each row.
//
// The online softmax of FlashAttention (Dao et al., 2022) over groups of keys, counted from
// key 0, so that a row's arithmetic depends on the keys that it sees and on nothing else: not on
// the batch, the threads, the other rows, or how many keys follow.

// A block of queries reuses a group of keys from L2; the scores of a strip of it fit in L1.
template <class Op>
constexpr int64_t kRowBlock = Op::kTiled ? 4 * Op::kRows : 16 * Op::kRows;
template <class Op>
constexpr int64_t kGroup = Op::kTiled ? 4 * kBlock : 8 * kBlock;

// The keys and values of one (sequence, kv head), ready to multiply with.
template <class Op>
struct PackedKeys {
  typename Op::Element* k = nullptr;  // transposed panels
  typename Op::Element* v = nullptr;  // row panels
  int64_t v_panel = 0;                // elements between column panels of v
  uint8_t* v_finite = nullptr;        // per block: no NaN or infinity among the values

  void layout(Workspace& w, int64_t keys, int64_t head_dim, int64_t value_dim) {
    using T = typename Op::Real;
    w.take(k, keys * depth_of<Op>(head_dim));
    w.take(v, keys * ceil_to(value_dim, kPanel<T>));
    w.take(v_finite, keys / kBlock);
    v_panel = keys * kPanel<T>;
  }
  PackedKeys from(int64_t key, int64_t head_dim) const {
    using T = typename Op::Real;
    return {k + key * depth_of<Op>(head_dim), v + key * kPanel<T>, v_panel,
            v_finite + key / kBlock};
  }
};

// Rows of one array that belong to a sequence, from row `first` of it on.
ATTNKIT_INLINE Rows key_rows(const AttentionParams& p, const Array& array, const Sequence& s,
                             int64_t head, int64_t first, int64_t count, int64_t width) {
  Rows r{&array, s.entry, head, s.k0 + first, count, width};
  if (p.keep) r.keep = p.keep + s.entry * p.k_rows + s.k0 + first;
  return r;
}

template <class Op>
class Forward {
  using T = typename Op::Real;
  using Element = typename Op::Element;

 public:
  Forward(const AttentionParams& p, const Team& team)
      : p_(p),
        team_(team),
        group_(p.q_heads / greater<int64_t>(p.kv_heads, 1)),
        q_ld_(depth_of<Op>(p.head_dim)),
        o_ld_(ceil_to(p.value_dim, kPanel<T>)),
        o_columns_(ceil_to(p.value_dim, kLanes<T>)) {}

  void run() {
    // A (sequence, kv head) is packed and used at once by one worker when there are enough of them
    // to share out; else keys are packed for all first.  The arithmetic is the same.
    const int64_t heads = p_.sequences * p_.kv_heads;
    const int64_t row_blocks = (p_.max_lq + kRowBlock<Op> - 1) / kRowBlock<Op>;
    const bool together = heads >= 4 * team_.threads && p_.max_lk <= 1024;
    const int64_t worker_keys = together ? ceil_to(p_.max_lk, kBlock) : 0;
    const int64_t shared_keys = together ? 0 : p_.packed_keys * p_.kv_heads;

    const int64_t blocks = (p_.max_lk + kBlock - 1) / kBlock;
    const int64_t items =
        together ? heads : greater(heads * blocks, row_blocks * p_.sequences * p_.q_heads);
    const int workers = static_cast<int>(lesser<int64_t>(team_.threads, items));

    PackedKeys<Op> shared;
    auto* scratch = static_cast<Scratch*>(__builtin_alloca(workers * sizeof(Scratch)));
    Workspace workspace([&](Workspace& w) {
      key_labels_.layout(w, p_.packed_keys, p_.keep, p_.k_segments);
      query_labels_.layout(w, p_.packed_rows, false, p_.q_segments);
      shared.layout(w, shared_keys, p_.head_dim, p_.value_dim);
      for (int i = 0; i < workers; ++i) layout(w, scratch[i], worker_keys);
    });
    fill_labels(p_, team_, key_labels_, query_labels_);

    if (together) {
      for_each(team_, heads, [&](int64_t item, int worker) {
        [[maybe_unused]] typename Op::Unit unit;
        Scratch& t = scratch[worker];
        const int64_t sequence = item / p_.kv_heads, kv = item % p_.kv_heads;
        const Sequence& s = p_.sequence[sequence];
        for (int64_t block = 0; block * kBlock < s.lk; ++block) pack(s, kv, block, t.keys, t.fetch);
        for (int64_t h = kv * group_; h < (kv + 1) * group_; ++h)
          for (int64_t r = 0; r < s.lq; r += kRowBlock<Op>) rows(sequence, h, r, t.keys, t);
      });
      return;
    }
    for_each(team_, heads * blocks, [&](int64_t item, int worker) {
      const int64_t block = item % blocks, head = item / blocks;
      const Sequence& s = p_.sequence[head / p_.kv_heads];
      if (block * kBlock < s.lk)
        pack(s, head % p_.kv_heads, block, at(shared, s, head % p_.kv_heads),
             scratch[worker].fetch);
    });
    // Longest first where later rows see more keys: the last items to be taken are short ones.
    for_each(team_, row_blocks * p_.sequences * p_.q_heads, [&](int64_t item, int worker) {
      [[maybe_unused]] typename Op::Unit unit;
      const int64_t all = p_.sequences * p_.q_heads;
      const int64_t r = (row_blocks - 1 - item / all) * kRowBlock<Op>;
      const int64_t sequence = item % all / p_.q_heads, h = item % p_.q_heads;
      const Sequence& s = p_.sequence[sequence];
      if (r < s.lq) rows(sequence, h, r, at(shared, s, h / group_), scratch[worker]);
    });
  }

 private:
  struct Scratch {
    Element* q;      // [kRowBlock<Op>][q_ld]
    T* o;            // [kRowBlock<Op>][o_ld]
    T* m;            // [kRowBlock<Op>] running maximum, before `unit`
    T* l;            // [kRowBlock<Op>][lanes] running sums
    T* s;            // [Op::kRows][kGroup<Op>] scores, then weights
    Element* w;      // [Op::kRows][kGroup<Op>] weights as an operand (only for pairs)
    T* bias;         // [kGroup<Op>]
    T* top;          // [Op::kRows][lanes] maximum of each row of s
    T* raw;          // [kGroup<Op>] a copy of the scores, where values are not finite
    Element* fetch;  // for packing
    PackedKeys<Op> keys;
    T early, unit;  // scale of a score before something is added to it, and inside the exponential
  };
  struct Run {
    int64_t begin, end;  // columns of the group
  };

  void layout(Workspace& w, Scratch& t, int64_t keys) {
    w.take(t.q, kRowBlock<Op> * q_ld_);
    w.take(t.o, kRowBlock<Op> * o_ld_);
    w.take(t.m, kRowBlock<Op>);
    w.take(t.l, kRowBlock<Op> * kLanes<T>);
    w.take(t.s, Op::kRows * kGroup<Op>);
    w.take(t.w, Op::kPair > 1 ? Op::kRows * kGroup<Op> : 0);
    w.take(t.bias, kGroup<Op>);
    w.take(t.top, Op::kRows * kLanes<T>);
    w.take(t.raw, kGroup<Op>);
    w.take(t.fetch, kLanes<T> * scratch_of<Op>(p_.head_dim) + 2 * o_ld_);
    t.keys.layout(w, keys, p_.head_dim, p_.value_dim);
  }

  PackedKeys<Op> at(const PackedKeys<Op>& shared, const Sequence& s, int64_t kv) const {
    return shared.from(kv * p_.packed_keys + s.key_pad, p_.head_dim);
  }

  // Nothing reads a block past its last key, rounded up to a panel.
  void pack(const Sequence& s, int64_t kv, int64_t block, const PackedKeys<Op>& keys,
            Element* fetch) {
    const int64_t j = block * kBlock, n = lesser(kBlock, s.lk - j);
    const int64_t rounded = ceil_to(n, kPanel<T>);
    const PackedKeys<Op> to = keys.from(j, p_.head_dim);
    pack_transposed<Op>(key_rows(p_, p_.k, s, kv, j, n, p_.head_dim), rounded, T{1}, to.k, fetch);
    *to.v_finite = pack_rows<Op>(key_rows(p_, p_.v, s, kv, j, n, p_.value_dim), rounded, T{1}, to.v,
                                 to.v_panel, fetch);
  }

  // Up to kRowBlock<Op> queries of one head, from row r of the sequence on.
  void rows(int64_t sequence, int64_t h, int64_t r, const PackedKeys<Op>& keys, Scratch& t) {
    const Sequence& s = p_.sequence[sequence];
    const int64_t n = lesser(kRowBlock<Op>, s.lq - r), rounded = ceil_to(n, Op::kRows);
    const Labels<T> key_labels = key_labels_.from(s.key_pad);
    const Labels<T> query_labels = query_labels_.from(s.row_pad);
    const Head<T> head(p_, sequence, h, key_labels, query_labels);
    const Dropout<T> dropout(p_, h, sequence);

    // Scores are scaled through q; where q is to stay exact, inside the exponential, unless
    // something is added to them first (or the sign would turn their order).
    const bool late = p_.scale > 0 && !head.changes_values();
    t.early = Op::kPair == 1 || late ? T{1} : static_cast<T>(p_.scale);
    t.unit = Op::kPair > 1 && late ? static_cast<T>(p_.scale) : T{1};
    copy_rows<Op>(Rows{&p_.q, s.entry, h, s.q0 + r, n, p_.head_dim}, rounded,
                  static_cast<T>(p_.scale), t.q, q_ld_);
    for (int64_t x = 0; x < rounded * o_ld_; ++x) t.o[x] = 0;
    for (int64_t x = 0; x < rounded; ++x) t.m[x] = -kInfinity<T>;
    for (int64_t x = 0; x < rounded * kLanes<T>; ++x) t.l[x] = 0;
    if constexpr (Op::kPair > 1)
      for (int64_t x = 0; x < Op::kRows * kGroup<Op>; ++x) t.w[x] = 0;

    for (int64_t g = floor_to(head.first_key(r), kGroup<Op>); g < head.last_key(r + n);
         g += kGroup<Op>)
      for (int64_t x = 0; x < n; x += Op::kRows)
        strip(head, dropout, r + x, lesser<int64_t>(Op::kRows, n - x), x, g, keys, t);

    for (int64_t x = 0; x < n; ++x) finish(s, h, r + x, x, t);
  }

  // `n` queries from i on (rows x.. of the scratch) against the group of keys from g on.
  void strip(const Head<T>& head, const Dropout<T>& dropout, int64_t i, int64_t n, int64_t x,
             int64_t g, const PackedKeys<Op>& keys, Scratch& t) {
    const int64_t begin = floor_to(greater(g, head.first_key(i)), kPanel<T>);
    const int64_t end = ceil_to(lesser(g + kGroup<Op>, head.last_key(i + n)),
                                greater<int64_t>(kLanes<T>, Op::kDepth));
    const int64_t depth = depth_of<Op>(p_.head_dim);
    Run runs[kGroup<Op> / kBlock];
    int count = 0;
    bool finite = true;
    for (int64_t m = 0; m < Op::kRows; ++m) store(t.top + m * kLanes<T>, splat(-kInfinity<T>));
    for (int64_t j = begin; j < end; j = floor_to(j, kBlock) + kBlock) {
      const int64_t block = j / kBlock, stop = lesser(end, (block + 1) * kBlock);
      if (!head.any(i, i + n, block)) continue;
      T* s = t.s + (j - g);
      const bool plain = t.early == 1 && head.plain(i, i + n, j, stop);
      scores(t.q + x * q_ld_, keys.k + j * depth, depth, stop - j, plain, s, t);
      if (!plain)
        for (int64_t m = 0; m < n; ++m) {
          head.row(i + m, j, stop - j, s + m * kGroup<Op>, t.bias, t.early);
          note_top(s + m * kGroup<Op>, stop - j, t.top + m * kLanes<T>);
        }
      finite &= keys.v_finite[block] != 0;
      if (count && runs[count - 1].end == j - g)
        runs[count - 1].end = stop - g;
      else
        runs[count++] = {j - g, stop - g};
    }
    if (!count) return;
    // a loop over the rows for each step: the steps of one row wait for each other
    for (int64_t m = 0; m < n; ++m) raise(load(t.top + m * kLanes<T>), t, x + m);
    const bool keep = dropout.active || !finite;
    for (int64_t m = 0; m < n; ++m) {
      T* s = t.s + m * kGroup<Op>;
      Element* w = weights(t) + m * kGroup<Op>;
      if (!finite) __builtin_memcpy(t.raw, s, kGroup<Op> * sizeof(T));
      if (keep)
        weigh<true>(runs, count, s, w, t, x + m);
      else
        weigh<false>(runs, count, s, w, t, x + m);
      if (dropout.active) drop(dropout, runs, count, i + m, g, s, w, t.bias);
      if (!finite) add_visible(runs, count, g, s, keys, t, x + m);
    }
    if (!finite) return;
    for (int c = 0; c < count; ++c)
      accumulate<Op>(weights(t) + runs[c].begin, kGroup<Op>,
                     keys.v + (g + runs[c].begin) * kPanel<T>, keys.v_panel,
                     runs[c].end - runs[c].begin, t.o + x * o_ld_, o_ld_, o_columns_);
  }

  static Element* weights(const Scratch& t) {
    if constexpr (Op::kPair > 1)
      return t.w;
    else
      return t.s;
  }

  // s = q k^T for one block of keys, its maximum noted where nothing changes it any more.
  void scores(const Element* q, const Element* k, int64_t depth, int64_t columns, bool last, T* s,
              Scratch& t) {
    const int64_t panel = kPanel<T> * depth;
    if constexpr (Op::kTiled) {
      product<Op>(q, q_ld_, k, panel, depth, s, kGroup<Op>, columns);
      if (last)
        for (int64_t m = 0; m < Op::kRows; ++m)
          note_top(s + m * kGroup<Op>, columns, t.top + m * kLanes<T>);
    } else {
      multiply<Op>(q, q_ld_, k, panel, depth, columns,
                   [&]<int N>(int64_t at, const Vec<T>(&c)[Op::kRows][N]) {
                     store_tile<Op::kRows, N, T>(s + at, kGroup<Op>, c);
                     if (!last) return;
#pragma GCC unroll 8
                     for (int m = 0; m < Op::kRows; ++m) {
                       Vec<T> top = load(t.top + m * kLanes<T>);
#pragma GCC unroll 4
                       for (int n = 0; n < N; ++n) top = vmax<T>(c[m][n], top);
                       store(t.top + m * kLanes<T>, top);
                     }
                   });
    }
  }

  static void note_top(const T* s, int64_t n, T* top) {
    Vec<T> best = load(top);
    for (int64_t y = 0; y < n; y += kLanes<T>) best = vmax<T>(load(s + y), best);
    store(top, best);
  }

  // Raise the running maximum of one row, and rescale what was summed.
  void raise(Vec<T> top, Scratch& t, int64_t row) {
    const T old = t.m[row];
    if (!exceeds<T>(top, old)) return;
    const T m = max_lanes<T>(top);
    t.m[row] = m;
    const Vec<T> shrink = exp2(splat(old - m), t.unit * kLog2e<T>);
    store(t.l + row * kLanes<T>, load(t.l + row * kLanes<T>) * shrink);
    T* o = t.o + row * o_ld_;
    for (int64_t d = 0; d < o_columns_; d += kLanes<T>) store(o + d, load(o + d) * shrink);
  }

  // Turn the scores of one row into weights: `w`, as an operand, and s, too, if kKeep.
  template <bool kKeep>
  void weigh(const Run* runs, int count, T* s, Element* w, Scratch& t, int64_t row) {
    const T unit = t.unit * kLog2e<T>;
    // a row that has seen no key keeps m = -inf; a finite pivot makes its weights 0, not NaN
    const Vec<T> pivot = splat(t.m[row] == -kInfinity<T> ? T{0} : t.m[row]);
    Vec<T> sum = load(t.l + row * kLanes<T>);
    for (int c = 0; c < count; ++c)
#pragma GCC unroll 2
      for (int64_t y = runs[c].begin; y < runs[c].end; y += kLanes<T>) {
        const Vec<T> weight = exp2<Op::kExpDegree>(load(s + y) - pivot, unit);
        sum += weight;
        store_element(w + y, weight);
        if constexpr (kKeep && Op::kPair > 1) store(s + y, weight);
      }
    store(t.l + row * kLanes<T>, sum);
  }

  void drop(const Dropout<T>& dropout, const Run* runs, int count, int64_t i, int64_t g, T* s,
            Element* w, T* factors) {
    for (int c = 0; c < count; ++c) {
      const int64_t n = runs[c].end - runs[c].begin, start = runs[c].begin;
      dropout.row(i, g + start, n, factors);
      for (int64_t y = 0; y < n; y += kLanes<T>) {
        const Vec<T> kept = load(s + start + y) * load(factors + y);
        store(s + start + y, kept);
        store_element(w + start + y, kept);
      }
    }
  }

  // o += w v over the visible keys only: 0 * NaN of a hidden key would be NaN.
  void add_visible(const Run* runs, int count, int64_t g, const T* s, const PackedKeys<Op>& keys,
                   Scratch& t, int64_t row) {
    T* o = t.o + row * o_ld_;
    for (int c = 0; c < count; ++c)
      for (int64_t y = runs[c].begin; y < runs[c].end; ++y) {
        if (t.raw[y] == -kInfinity<T>) continue;
        const Vec<T> w = splat(s[y]);
        for (int64_t d = 0; d < o_columns_; d += kLanes<T>) {
          const Element* panel = keys.v + d / kPanel<T> * keys.v_panel;
          Vec<T> v;
          if constexpr (Op::kPair == 1)
            v = load(panel + (g + y) * kPanel<T> + d % kPanel<T>);
          else
            for (int l = 0; l < kLanes<T>; ++l)
              v[l] = from_bf16(
                  panel[floor_to(g + y, 2) * kPanel<T> + 2 * (d % kPanel<T> + l) + (g + y) % 2]);
          store(o + d, load(o + d) + w * v);
        }
      }
  }

  // Divide by the sum, store the row and its logsumexp.
  void finish(const Sequence& s, int64_t h, int64_t i, int64_t row, Scratch& t) {
    T m = t.m[row] * t.unit, l = sum_lanes<T>(load(t.l + row * kLanes<T>)), factor = 1;
    if (p_.sinks) {  // one more key, with weight but without a value
      const T sink = static_cast<T>(p_.sinks[h]), top = greater(m, sink);
      if (top != -kInfinity<T>) {
        factor = exp2(splat((m - top) * kLog2e<T>))[0];
        l = l * factor + exp2(splat((sink - top) * kLog2e<T>))[0];
        m = top;
      }
    }
    const T inverse = l == 0 ? T{0} : factor / l;
    store_row(t.o + row * o_ld_, p_.value_dim, inverse,
              mutable_row_of(p_.out, s.entry, h, s.q0 + i), p_.out.dtype, p_.out.column);
    T* lse = static_cast<T*>(p_.lse) + (s.entry * p_.q_heads + h) * p_.q_rows + s.q0 + i;
    *lse = l == 0 ? -kInfinity<T> : m + static_cast<T>(log_of(l));
  }

  const AttentionParams& p_;
  const Team& team_;
  int64_t group_, q_ld_, o_ld_, o_columns_;
  Labels<T> key_labels_, query_labels_;
};
