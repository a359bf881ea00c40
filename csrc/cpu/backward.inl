// dV = P^T dO;  dS = P * (dO V^T - delta);  dQ = scale dS K;  dK = scale dS^T Q,
// with P recomputed from the scores and lse, and delta = rowsum(dO * O) - dlse.
//
// Everything is computed transposed, a strip of keys against a block of 64 queries: P^T and dS^T
// come out of the registers as the rows that dV and dK multiply with, and dS^T, strip below strip,
// is the right operand of dQ^T = K^T dS^T.  A task is one chunk of keys of one kv head, with its dK
// and dV in private memory.  dQ is summed over chunks in their order: a turnstile per block of
// queries lets chunk c in after chunk c - 1, so the bits do not depend on the number of threads.

template <class Op>
constexpr int64_t kKeyChunk = Op::kTiled ? 4 * Op::kRows : 16 * Op::kRows;

// The queries of one head, ready to multiply with.
template <class Op>
struct PackedQueries {
  using T = typename Op::Real;
  typename Op::Element *q_columns = nullptr, *g_columns = nullptr;  // q, dO as transposed panels
  typename Op::Element *q_rows = nullptr, *g_rows = nullptr;        // q, dO as row panels
  T *lse = nullptr, *low = nullptr, *delta = nullptr;
  int64_t q_panel = 0, g_panel = 0;

  void layout(Workspace& w, int64_t rows, int64_t head_dim, int64_t value_dim) {
    w.take(q_columns, rows * depth_of<Op>(head_dim));
    w.take(g_columns, rows * depth_of<Op>(value_dim));
    w.take(q_rows, rows * ceil_to(head_dim, kPanel<T>));
    w.take(g_rows, rows * ceil_to(value_dim, kPanel<T>));
    w.take(lse, rows);
    w.take(low, rows);
    w.take(delta, rows);
    q_panel = g_panel = rows * kPanel<T>;
  }
  PackedQueries from(int64_t row, int64_t head_dim, int64_t value_dim) const {
    PackedQueries r = *this;
    r.q_columns += row * depth_of<Op>(head_dim);
    r.g_columns += row * depth_of<Op>(value_dim);
    r.q_rows += row * kPanel<T>;
    r.g_rows += row * kPanel<T>;
    r.lse += row;
    r.low += row;
    r.delta += row;
    return r;
  }
};

template <class Op>
class Backward {
  using T = typename Op::Real;
  using Element = typename Op::Element;

 public:
  Backward(const AttentionParams& p, const Team& team)
      : p_(p),
        team_(team),
        group_(p.q_heads / greater<int64_t>(p.kv_heads, 1)),
        k_ld_(scratch_of<Op>(depth_of<Op>(p.head_dim))),
        v_ld_(depth_of<Op>(p.value_dim)),
        dq_rows_(ceil_to(ceil_to(p.head_dim, kLanes<T>), Op::kRows)),
        dk_ld_(ceil_to(p.head_dim, kPanel<T>)),
        dv_ld_(ceil_to(p.value_dim, kPanel<T>)),
        dk_columns_(ceil_to(p.head_dim, kLanes<T>)),
        dv_columns_(ceil_to(p.value_dim, kLanes<T>)),
        // float32 has the scale in q already; pairs keep q exact
        q_factor_(Op::kPair == 1 ? static_cast<T>(p.scale) : T{1}),
        s_factor_(Op::kPair == 1 ? T{1} : static_cast<T>(p.scale)) {}

  void run() {
    const int64_t heads = p_.sequences * p_.kv_heads;
    const bool together = heads >= 4 * team_.threads && p_.max_lq <= 1024;
    const int64_t chunks = (p_.max_lk + kKeyChunk<Op> - 1) / kKeyChunk<Op>;
    const int64_t blocks = (p_.max_lq + kBlock - 1) / kBlock;
    const int64_t all_heads = p_.sequences * p_.q_heads;
    const int64_t items = together ? heads : greater(chunks * heads, all_heads * blocks);
    const int workers = static_cast<int>(lesser<int64_t>(team_.threads, items));
    const int64_t shared_rows = together ? 0 : p_.packed_rows * p_.q_heads;

    PackedQueries<Op> shared;
    T* shared_dq = nullptr;
    int64_t* turn = nullptr;
    auto* scratch = static_cast<Scratch*>(__builtin_alloca(workers * sizeof(Scratch)));
    Workspace workspace([&](Workspace& w) {
      key_labels_.layout(w, p_.packed_keys, p_.keep, p_.k_segments);
      query_labels_.layout(w, p_.packed_rows, false, p_.q_segments);
      shared.layout(w, shared_rows, p_.head_dim, p_.value_dim);
      w.take(shared_dq, shared_rows * dq_rows_);
      w.take(turn, shared_rows / kBlock);
      for (int i = 0; i < workers; ++i)
        layout(w, scratch[i], together ? ceil_to(p_.max_lq, kBlock) : 0);
    });
    fill_labels(p_, team_, key_labels_, query_labels_);

    if (together) {
      for_each(team_, heads, [&](int64_t item, int worker) {
        [[maybe_unused]] typename Op::Unit unit;
        Scratch& t = scratch[worker];
        const int64_t sequence = item / p_.kv_heads, kv = item % p_.kv_heads;
        const Sequence& s = p_.sequence[sequence];
        // one chunk holds dK and dV over the heads of its group, so heads are the inner loop; their
        // packed queries do not all fit, and are made again for every chunk but where one suffices
        if (group_ == 1) begin_head(s, sequence, kv, t.queries, t.dq, t);
        for (int64_t c = 0; c * kKeyChunk<Op> < greater<int64_t>(s.lk, 1); ++c) {
          open_chunk(s, kv, c, t);
          for (int64_t h = kv * group_; h < (kv + 1) * group_; ++h) {
            if (group_ > 1)
              begin_head(s, sequence, h, t.queries, c ? nullptr : head_dq(t, h - kv * group_), t);
            T* dq = group_ > 1 ? head_dq(t, h - kv * group_) : t.dq;
            for (int64_t i = 0; i < s.lq; i += kBlock)
              block(sequence, h, c, i, t.queries, dq, t, [] {});
          }
          close_chunk(s, kv, c, t);
        }
        for (int64_t h = kv * group_; h < (kv + 1) * group_; ++h)
          for (int64_t i = 0; i < s.lq; i += kBlock)
            store_dq(s, h, i, group_ > 1 ? head_dq(t, h - kv * group_) : t.dq);
      });
      return;
    }
    for_each(team_, all_heads * blocks, [&](int64_t item, int worker) {
      const int64_t b = item % blocks, h = item / blocks % p_.q_heads;
      const int64_t sequence = item / blocks / p_.q_heads;
      const Sequence& s = p_.sequence[sequence];
      if (b * kBlock >= s.lq) return;
      const int64_t row = h * p_.packed_rows + s.row_pad;
      pack(s, sequence, h, b * kBlock, shared.from(row, p_.head_dim, p_.value_dim),
           scratch[worker].fetch);
      clear(shared_dq + (row + b * kBlock) * dq_rows_, kBlock * dq_rows_);
      turn[row / kBlock + b] = 0;
    });
    // Chunk by chunk over all heads: neighbours in this order rarely wait for each other, and a
    // chunk's predecessor has always been taken before it, so a waiting worker waits for a running
    // one.
    for_each(team_, chunks * heads, [&](int64_t item, int worker) {
      [[maybe_unused]] typename Op::Unit unit;
      Scratch& t = scratch[worker];
      const int64_t c = item / heads, sequence = item % heads / p_.kv_heads;
      const int64_t kv = item % p_.kv_heads;
      const Sequence& s = p_.sequence[sequence];
      if (c * kKeyChunk<Op> >= s.lk) return;
      open_chunk(s, kv, c, t);
      for (int64_t h = kv * group_; h < (kv + 1) * group_; ++h) {
        const int64_t row = h * p_.packed_rows + s.row_pad;
        const PackedQueries<Op> queries = shared.from(row, p_.head_dim, p_.value_dim);
        for (int64_t i = 0; i < s.lq; i += kBlock) {
          int64_t* gate = turn + row / kBlock + i / kBlock;
          const auto wait = [&] {
            while (__atomic_load_n(gate, __ATOMIC_ACQUIRE) != c) yield();
          };
          if (!block(sequence, h, c, i, queries, shared_dq + row * dq_rows_, t, wait)) wait();
          __atomic_store_n(gate, c + 1, __ATOMIC_RELEASE);
        }
      }
      close_chunk(s, kv, c, t);
    });
    for_each(team_, all_heads * blocks, [&](int64_t item, int) {
      const int64_t b = item % blocks, h = item / blocks % p_.q_heads;
      const Sequence& s = p_.sequence[item / blocks / p_.q_heads];
      if (b * kBlock < s.lq)
        store_dq(s, h, b * kBlock, shared_dq + (h * p_.packed_rows + s.row_pad) * dq_rows_);
    });
  }

 private:
  struct Scratch {
    Element *k, *v;      // [kKeyChunk<Op>] rows of this chunk, the left operands of S^T and dP^T
    Element* k_columns;  // [dq_rows][kKeyChunk<Op>] K^T, the left operand of dQ^T
    T *dk, *dv;          // [kKeyChunk<Op>][..]
    T *s, *p, *ds;       // [Op::kRows][kBlock] strips of S^T, P^T, dS^T
    T *slope, *drop;     // [Op::kRows][kBlock]
    T* bias;             // [kKeyChunk<Op>][kBlock] the bias, transposed
    T* lines;            // [lanes][kKeyChunk<Op>] rows of the bias, or of its gradient
    T* dbias;            // [kKeyChunk<Op>][kBlock] dS^T before softcap
    Element *p_left, *ds_left;  // [Op::kRows][kBlock] as left operands (only for pairs)
    Element* ds_right;          // [kKeyChunk<Op>][kBlock] dS^T in row panels
    Element* fetch;
    T* dq;  // [heads of the group][blocks][dq_rows][kBlock] when a worker keeps a whole kv head
    PackedQueries<Op> queries;
    bool k_finite;
  };

  void layout(Workspace& w, Scratch& t, int64_t rows) {
    constexpr int64_t kStrip = Op::kRows * kBlock;
    w.take(t.k, kKeyChunk<Op> * k_ld_);
    w.take(t.v, kKeyChunk<Op> * v_ld_);
    w.take(t.k_columns, kKeyChunk<Op> * dq_rows_);
    w.take(t.dk, kKeyChunk<Op> * dk_ld_);
    w.take(t.dv, kKeyChunk<Op> * dv_ld_);
    w.take(t.s, kStrip);
    w.take(t.p, kStrip);
    w.take(t.ds, kStrip);
    w.take(t.slope, p_.softcap > 0 ? kStrip : 0);
    w.take(t.drop, p_.dropout > 0 ? (Op::kRows + 6) * kBlock : 0);
    w.take(t.bias, p_.bias.data ? kKeyChunk<Op> * kBlock : 0);
    w.take(t.lines, p_.bias.data ? kLanes<T> * kKeyChunk<Op> : 0);
    w.take(t.dbias, p_.dbias.data ? kKeyChunk<Op> * kBlock : 0);
    w.take(t.p_left, Op::kPair > 1 ? kStrip : 0);
    w.take(t.ds_left, Op::kPair > 1 ? kStrip : 0);
    w.take(t.ds_right, kKeyChunk<Op> * kBlock);
    w.take(t.fetch, kLanes<T> * scratch_of<Op>(greater(p_.head_dim, p_.value_dim)) +
                        2 * greater(dk_ld_, dv_ld_));
    w.take(t.dq, rows * dq_rows_ * group_);
    t.queries.layout(w, rows, p_.head_dim, p_.value_dim);
  }

  static void clear(T* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] = 0;
  }
  T* head_dq(const Scratch& t, int64_t g) const {
    return t.dq + g * ceil_to(p_.max_lq, kBlock) * dq_rows_;
  }

  // ---------------------------------------------------------------- operands

  void begin_head(const Sequence& s, int64_t sequence, int64_t h, const PackedQueries<Op>& queries,
                  T* dq, Scratch& t) {
    for (int64_t i = 0; i < s.lq; i += kBlock) pack(s, sequence, h, i, queries, t.fetch);
    if (dq) clear(dq, ceil_to(s.lq, kBlock) * dq_rows_);
  }

  // The block of queries from i on: q and dO in both orientations, lse and delta.
  void pack(const Sequence& s, int64_t sequence, int64_t h, int64_t i,
            const PackedQueries<Op>& queries, Element* fetch) {
    const PackedQueries<Op> to = queries.from(i, p_.head_dim, p_.value_dim);
    const int64_t n = lesser(kBlock, s.lq - i), first = s.q0 + i;
    const int64_t at = (s.entry * p_.q_heads + h) * p_.q_rows + first;
    const T* lse = static_cast<const T*>(p_.lse) + at;

    // A row that sees no key takes part in nothing, whatever its q and dO hold.
    uint8_t live[kBlock];
    const T sink = p_.sinks ? static_cast<T>(p_.sinks[h]) : -kInfinity<T>;
    T sink_sum = 0;
    for (int64_t r = 0; r < kBlock; ++r) {
      live[r] = r < n && lse[r] != -kInfinity<T>;
      to.lse[r] = live[r] ? lse[r] : kInfinity<T>;  // exp(s - inf) = 0
      to.low[r] = live[r] && p_.low ? static_cast<const T*>(p_.low)[at + r] : T{0};
      T delta = 0;
      if (live[r]) {
        delta = delta_of<T>(p_, s.entry, h, first + r);
        if (p_.sinks) sink_sum -= exp2(splat((sink - lse[r]) * kLog2e<T> - to.low[r]))[0] * delta;
      }
      to.delta[r] = delta;
    }
    if (p_.dsinks)  // one slot per block of 64 queries: summed in order by the caller
      p_.dsinks[(sequence * p_.q_heads + h) * dsink_slots() + i / kBlock] = sink_sum;

    const Rows q{&p_.q, s.entry, h, first, n, p_.head_dim, live};
    const Rows g{&p_.dout, s.entry, h, first, n, p_.value_dim, live};
    pack_transposed<Op>(q, kBlock, q_factor_, to.q_columns, fetch);
    pack_transposed<Op>(g, kBlock, T{1}, to.g_columns, fetch);
    pack_rows<Op>(q, kBlock, q_factor_, to.q_rows, to.q_panel, fetch);
    pack_rows<Op>(g, kBlock, T{1}, to.g_rows, to.g_panel, fetch);
  }
  int64_t dsink_slots() const { return (p_.max_lq + kBlock - 1) / kBlock; }

  void open_chunk(const Sequence& s, int64_t kv, int64_t c, Scratch& t) {
    const int64_t j = c * kKeyChunk<Op>, n = lesser(kKeyChunk<Op>, s.lk - j);
    const Rows k = key_rows(p_, p_.k, s, kv, j, n, p_.head_dim);
    const Rows v = key_rows(p_, p_.v, s, kv, j, n, p_.value_dim);
    t.k_finite = copy_rows<Op>(k, kKeyChunk<Op>, T{1}, t.k, k_ld_);
    copy_rows<Op>(v, kKeyChunk<Op>, T{1}, t.v, v_ld_);
    transpose_operand<Op>(t.k, k_ld_, kKeyChunk<Op>, p_.head_dim, t.k_columns);
    clear(t.dk, kKeyChunk<Op> * dk_ld_);
    clear(t.dv, kKeyChunk<Op> * dv_ld_);
  }

  void close_chunk(const Sequence& s, int64_t kv, int64_t c, Scratch& t) {
    const int64_t j = c * kKeyChunk<Op>, n = lesser(kKeyChunk<Op>, s.lk - j);
    for (int64_t r = 0; r < n; ++r) {
      if (p_.dk.data)
        store_row(t.dk + r * dk_ld_, p_.head_dim, s_factor_,
                  mutable_row_of(p_.dk, s.entry, kv, s.k0 + j + r), p_.dk.dtype, p_.dk.column);
      if (p_.dv.data)
        store_row(t.dv + r * dv_ld_, p_.value_dim, T{1},
                  mutable_row_of(p_.dv, s.entry, kv, s.k0 + j + r), p_.dv.dtype, p_.dv.column);
    }
  }

  // The block of queries from i on, of which `all` holds dQ^T block after block.
  void store_dq(const Sequence& s, int64_t h, int64_t i, const T* all) {
    if (!p_.dq.data) return;
    const T* dq = all + i * dq_rows_;
    for (int64_t r = 0; i + r < s.lq && r < kBlock; r += kLanes<T>) {
      T line[kLanes<T>][kBlock];
      for (int64_t d = 0; d < p_.head_dim; d += kBlock) {
        const int64_t columns = lesser(kBlock, p_.head_dim - d);
        for (int64_t x = 0; x < columns; x += kLanes<T>)
          transpose_square<T>(dq + (d + x) * kBlock + r, kBlock, &line[0][x], kBlock);
        for (int64_t y = 0; y < lesser<int64_t>(kLanes<T>, s.lq - i - r); ++y)
          store_row(line[y], columns, static_cast<T>(p_.scale),
                    mutable_row_of(p_.dq, s.entry, h, s.q0 + i + r + y) +
                        d * p_.dq.column * bytes_of(p_.dq.dtype),
                    p_.dq.dtype, p_.dq.column);
      }
    }
  }

  // ---------------------------------------------------------------- the work

  // The block of queries from i on against chunk c.  `enter` is called before dQ is added to;
  // returns false, without having called it, where nothing is visible.
  template <class Enter>
  bool block(int64_t sequence, int64_t h, int64_t c, int64_t i, const PackedQueries<Op>& all, T* dq,
             Scratch& t, const Enter& enter) {
    const Sequence& s = p_.sequence[sequence];
    const Labels<T> key_labels = key_labels_.from(s.key_pad);
    const Labels<T> query_labels = query_labels_.from(s.row_pad);
    const Head<T> head(p_, sequence, h, key_labels, query_labels);
    const Dropout<T> dropout(p_, h, sequence);
    const int64_t n = lesser(kBlock, s.lq - i), j0 = c * kKeyChunk<Op>;
    const int64_t first = greater(j0, head.first_key(i));
    const int64_t last = lesser(lesser(j0 + kKeyChunk<Op>, s.lk), head.last_key(i + n));
    if (first >= last) return false;
    const PackedQueries<Op> queries = all.from(i, p_.head_dim, p_.value_dim);
    if (p_.bias.data) transpose_bias(head, i, n, j0, t);

    // strips are counted from the chunk's start; untouched ones stay out of dQ's product
    const int64_t begin = floor_to(first - j0, Op::kRows), end = ceil_to(last - j0, Op::kRows);
    bool any = false;
    for (int64_t r = begin; r < end; r += Op::kRows) {
      const int64_t j = j0 + r, stop = lesser(j + Op::kRows, s.lk);
      bool on = head.any(i, i + n, j / kBlock);
      if ((stop - 1) / kBlock != j / kBlock) on |= head.any(i, i + n, (stop - 1) / kBlock);
      if (on)
        strip(head, dropout, r, j, stop, i, n, queries, t);
      else
        skip(r, t);
      any |= on;
    }
    if (!any) return false;
    if (p_.dbias.data) store_dbias(s, h, j0, begin, end, i, n, t);
    enter();
    if (p_.dq.data) add_dq(begin, end, n, dq + i * dq_rows_, t);
    return true;
  }

  // A strip that no query of the block sees.
  void skip(int64_t r, Scratch& t) {
    keep_for_dq(r, nullptr, t);
    if (p_.dbias.data) clear(t.dbias + r * kBlock, Op::kRows * kBlock);
  }

  // Op::kRows keys from j (row r of the chunk) against the queries [i, i + n).
  void strip(const Head<T>& head, const Dropout<T>& dropout, int64_t r, int64_t j, int64_t stop,
             int64_t i, int64_t n, const PackedQueries<Op>& queries, Scratch& t) {
    const int64_t k_depth = depth_of<Op>(p_.head_dim), v_depth = depth_of<Op>(p_.value_dim);
    const bool softcap = head.has_softcap();
    const int64_t middle = lesser(stop, floor_to(j, kBlock) + kBlock);  // where a block ends
    const bool plain = stop == j + Op::kRows && head.plain(i, i + n, j, middle) &&
                       (middle == stop || head.plain(i, i + n, middle, stop));
    if constexpr (!Op::kTiled)
      if (plain && !dropout.active && !p_.dbias.data) return plain_strip(r, queries, t);

    product<Op>(t.k + r * k_ld_, k_ld_, queries.q_columns, kPanel<T> * k_depth, k_depth, t.s,
                kBlock, kBlock);
    if (!plain)
      for (int m = 0; m < Op::kRows; ++m)
        head.column(j + m, i, kBlock, t.s + m * kBlock,
                    p_.bias.data ? t.bias + (r + m) * kBlock : nullptr,
                    softcap ? t.slope + m * kBlock : nullptr, s_factor_);
    weights(queries, plain ? s_factor_ : T{1}, t);
    if (dropout.active) drop_factors(dropout, j, i, t);

    // dV += (P * drop)^T dO
    T* kept = t.p;
    if (dropout.active) {
      kept = t.ds;
      for (int64_t x = 0; x < Op::kRows * kBlock; x += kLanes<T>)
        store(t.ds + x, load(t.p + x) * load(t.drop + x));
    }
    accumulate<Op>(left(kept, t.p_left), kBlock, queries.g_rows, queries.g_panel, kBlock,
                   t.dv + r * dv_ld_, dv_ld_, dv_columns_);

    product<Op>(t.v + r * v_ld_, v_ld_, queries.g_columns, kPanel<T> * v_depth, v_depth, t.ds,
                kBlock, kBlock);
    for (int64_t x = 0; x < Op::kRows * kBlock; x += kLanes<T>) {
      const Vec<T> p = load(t.p + x);
      Vec<T> dp = load(t.ds + x);
      if (dropout.active) dp *= load(t.drop + x);
      Vec<T> ds = gradient(p, dp, load(queries.delta + x % kBlock));
      if (p_.dbias.data) store(t.dbias + r * kBlock + x, ds);
      if (softcap) ds = select<T>(p == Vec<T>{}, Vec<T>{}, ds * load(t.slope + x));
      store(t.ds + x, ds);
    }
    accumulate<Op>(left(t.ds, t.ds_left), kBlock, queries.q_rows, queries.q_panel, kBlock,
                   t.dk + r * dk_ld_, dk_ld_, dk_columns_);
    keep_for_dq(r, t.ds, t);
  }

  // The same where nothing is hidden, changed or dropped, with P^T and dS^T finished in registers.
  void plain_strip(int64_t r, const PackedQueries<Op>& queries, Scratch& t) {
    constexpr int kRows = Op::kRows;
    const int64_t k_depth = depth_of<Op>(p_.head_dim), v_depth = depth_of<Op>(p_.value_dim);
    multiply<Op>(t.k + r * k_ld_, k_ld_, queries.q_columns, kPanel<T> * k_depth, k_depth, kBlock,
                 [&]<int N>(int64_t at, Vec<T>(&c)[kRows][N]) {
#pragma GCC unroll 4
                   for (int n = 0; n < N; ++n) {
                     const int64_t x = at + n * kLanes<T>;
                     const Vec<T> lse = load(queries.lse + x), low = load(queries.low + x);
#pragma GCC unroll 8
                     for (int m = 0; m < kRows; ++m) {
                       c[m][n] = weight(c[m][n], s_factor_, lse, low);
                       store(t.p + m * kBlock + x, c[m][n]);
                       if constexpr (Op::kPair > 1)
                         store_element(t.p_left + m * kBlock + x, c[m][n]);
                     }
                   }
                 });
    accumulate<Op>(Op::kPair > 1 ? t.p_left : reinterpret_cast<const Element*>(t.p), kBlock,
                   queries.g_rows, queries.g_panel, kBlock, t.dv + r * dv_ld_, dv_ld_, dv_columns_);
    multiply<Op>(t.v + r * v_ld_, v_ld_, queries.g_columns, kPanel<T> * v_depth, v_depth, kBlock,
                 [&]<int N>(int64_t at, Vec<T>(&c)[kRows][N]) {
                   Element* right = t.ds_right + at * kKeyChunk<Op> + r * kPanel<T>;
#pragma GCC unroll 4
                   for (int n = 0; n < N; ++n) {
                     const int64_t x = at + n * kLanes<T>;
                     const Vec<T> delta = load(queries.delta + x);
#pragma GCC unroll 8
                     for (int m = 0; m < kRows; ++m) {
                       c[m][n] = gradient(load(t.p + m * kBlock + x), c[m][n], delta);
                       store_element(ds_left(t) + m * kBlock + x, c[m][n]);
                     }
#pragma GCC unroll 8
                     for (int m = 0; m < kRows; m += Op::kPair) {
                       Element* to = right + m * kPanel<T> + n * kLanes<T> * Op::kPair;
                       if constexpr (Op::kPair > 1)
                         store_pair(to, c[m][n], c[m + 1][n]);
                       else
                         store(to, c[m][n]);
                     }
                   }
                 });
    accumulate<Op>(ds_left(t), kBlock, queries.q_rows, queries.q_panel, kBlock, t.dk + r * dk_ld_,
                   dk_ld_, dk_columns_);
  }

  static Element* ds_left(const Scratch& t) {
    if constexpr (Op::kPair > 1)
      return t.ds_left;
    else
      return t.ds;
  }

  // P = exp(unit S - lse) / 2^low.
  static ATTNKIT_INLINE Vec<T> weight(Vec<T> s, T unit, Vec<T> lse, Vec<T> low) {
    return exp2<Op::kExpDegree>((s * unit - lse) * kLog2e<T> - low);
  }
  // dS = P * (dP - delta), 0 where P is: dP of a hidden key may be NaN.
  static ATTNKIT_INLINE Vec<T> gradient(Vec<T> p, Vec<T> dp, Vec<T> delta) {
    return select<T>(p == Vec<T>{}, Vec<T>{}, p * (dp - delta));
  }

  // P^T of a strip.
  void weights(const PackedQueries<Op>& queries, T unit, Scratch& t) {
    for (int64_t x = 0; x < kBlock; x += kLanes<T>) {
      const Vec<T> lse = load(queries.lse + x), low = load(queries.low + x);
      for (int64_t m = 0; m < Op::kRows; ++m)
        store(t.p + m * kBlock + x, weight(load(t.s + m * kBlock + x), unit, lse, low));
    }
  }

  // Counters come in fours of keys, strips in sixes: generate the fours that cover the strip.
  void drop_factors(const Dropout<T>& dropout, int64_t j, int64_t i, Scratch& t) {
    const int64_t start = floor_to(j, 4), shift = j - start;
    for (int64_t f = 0; f < shift + Op::kRows; f += 4)
      dropout.columns(start + f, i, kBlock, t.drop + f * kBlock, kBlock);
    if (shift) __builtin_memmove(t.drop, t.drop + shift * kBlock, Op::kRows * kBlock * sizeof(T));
  }

  // A strip as a left operand: itself, or rounded to pairs.
  static const Element* left(const T* strip, Element* rounded) {
    if constexpr (Op::kPair == 1) {
      return strip;
    } else {
      for (int64_t x = 0; x < Op::kRows * kBlock; x += kLanes<T>)
        store_element(rounded + x, load(strip + x));
      return rounded;
    }
  }

  // A strip of dS^T (nullptr: zeros) as rows of the right operand of dQ^T.
  void keep_for_dq(int64_t r, const T* ds, Scratch& t) {
    for (int64_t m = 0; m < Op::kRows; m += Op::kPair)
      for (int64_t x = 0; x < kBlock; x += kPanel<T>) {
        Element* to = t.ds_right + x * kKeyChunk<Op> + (r + m) * kPanel<T>;
        if (!ds)
          __builtin_memset(to, 0, Op::kPair * kPanel<T> * sizeof(Element));
        else if constexpr (Op::kPair == 1)
          __builtin_memcpy(to, ds + m * kBlock + x, kPanel<T> * sizeof(Element));
        else
          for (int64_t y = 0; y < kPanel<T>; y += kLanes<T>)
            store_pair(to + 2 * y, load(ds + m * kBlock + x + y),
                       load(ds + (m + 1) * kBlock + x + y));
      }
  }

  // dQ^T += K^T dS^T over the rows [begin, end) of the chunk.
  void add_dq(int64_t begin, int64_t end, int64_t n, T* dq, Scratch& t) {
    if (!t.k_finite) {
      add_visible(begin, end, n, dq, t);
      return;
    }
    for (int64_t d = 0; d < p_.head_dim; d += Op::kRows)
      accumulate<Op>(t.k_columns + d * kKeyChunk<Op> + begin, kKeyChunk<Op>,
                     t.ds_right + begin * kPanel<T>, kKeyChunk<Op> * kPanel<T>, end - begin,
                     dq + d * kBlock, kBlock, kBlock);
  }

  // The same where K holds NaN or infinities: a key with dS = 0 adds nothing.
  void add_visible(int64_t begin, int64_t end, int64_t n, T* dq, Scratch& t) {
    for (int64_t q = 0; q < n; ++q)
      for (int64_t r = begin; r < end; ++r) {
        const Element* panel = t.ds_right + floor_to(q, kPanel<T>) * kKeyChunk<Op>;
        const T ds = element(
            panel[(floor_to(r, Op::kPair) * kPanel<T>)+q % kPanel<T> * Op::kPair + r % Op::kPair]);
        if (ds == 0) continue;
        for (int64_t d = 0; d < p_.head_dim; ++d)
          dq[d * kBlock + q] += ds * element(t.k[r * k_ld_ + d]);
      }
  }
  static T element(Element x) {
    if constexpr (Op::kPair == 1)
      return x;
    else
      return from_bf16(x);
  }

  void transpose_bias(const Head<T>& head, int64_t i, int64_t n, int64_t j0, Scratch& t) {
    for (int64_t q = 0; q < kBlock; q += kLanes<T>) {
      for (int64_t y = 0; y < kLanes<T>; ++y) {
        T* line = t.lines + y * kKeyChunk<Op>;
        if (q + y < n)
          head.bias_row(i + q + y, j0, kKeyChunk<Op>, line);
        else
          clear(line, kKeyChunk<Op>);
      }
      for (int64_t r = 0; r < kKeyChunk<Op>; r += kLanes<T>)
        transpose_square<T>(t.lines + r, kKeyChunk<Op>, t.bias + r * kBlock + q, kBlock);
    }
  }

  // d(bias) of the keys [begin, end) of the chunk, where every entry of it belongs to one score.
  void store_dbias(const Sequence& s, int64_t h, int64_t j0, int64_t begin, int64_t end, int64_t i,
                   int64_t n, Scratch& t) {
    const int64_t columns = lesser(end, s.lk - j0) - begin;
    for (int64_t q = 0; q < n; q += kLanes<T>) {
      for (int64_t r = 0; r < kKeyChunk<Op>; r += kLanes<T>)
        transpose_square<T>(t.dbias + r * kBlock + q, kBlock, t.lines + r, kKeyChunk<Op>);
      for (int64_t y = 0; y < lesser<int64_t>(kLanes<T>, n - q); ++y)
        store_row(t.lines + y * kKeyChunk<Op> + begin, columns, T{1},
                  mutable_row_of(p_.dbias, s.entry, h, i + q + y) +
                      (j0 + begin) * p_.dbias.column * bytes_of(p_.dbias.dtype),
                  p_.dbias.dtype, p_.dbias.column);
    }
  }

  const AttentionParams& p_;
  const Team& team_;
  int64_t group_, k_ld_, v_ld_, dq_rows_, dk_ld_, dv_ld_, dk_columns_, dv_columns_;
  T q_factor_, s_factor_;
  Labels<T> key_labels_, query_labels_;
};
