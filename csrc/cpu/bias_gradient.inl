// d(bias) = dS summed over every dimension along which the bias was broadcast.
//
// A pass of its own: each work item owns a tile of d(bias), computes the dS that fall on it again,
// and adds them in a fixed order, so nothing of size Lq x Lk is needed but d(bias) itself, and the
// bits depend on no thread.  Sums are in double: a broadcast bias may add up many thousand terms.

template <class T>
class BiasGradient {
  using Op = Plain<T>;

 public:
  BiasGradient(const AttentionParams& p, const Team& team)
      : p_(p),
        team_(team),
        group_(p.q_heads / greater<int64_t>(p.kv_heads, 1)),
        q_ld_(p.head_dim),
        g_ld_(p.value_dim) {}

  void run() {
    const int64_t heads = p_.sequences * p_.kv_heads;
    const int64_t blocks = (p_.max_lk + kBlock - 1) / kBlock;
    const int64_t row_tiles =
        p_.bias_row == 1 ? 1 : (p_.max_lq + kRowBlock<Op> - 1) / kRowBlock<Op>;
    const int64_t column_tiles =
        p_.bias_column == 1 ? 1 : (p_.max_lk + kGroup<Op> - 1) / kGroup<Op>;
    const int64_t tiles = p_.bias_batch * p_.bias_head * row_tiles * column_tiles;
    const int workers =
        static_cast<int>(lesser<int64_t>(team_.threads, greater(tiles, heads * blocks)));

    T *k = nullptr, *v = nullptr;
    auto* scratch = static_cast<Scratch*>(__builtin_alloca(workers * sizeof(Scratch)));
    Workspace workspace([&](Workspace& w) {
      key_labels_.layout(w, p_.packed_keys, p_.keep, p_.k_segments);
      query_labels_.layout(w, p_.packed_rows, false, p_.q_segments);
      w.take(k, p_.packed_keys * p_.kv_heads * p_.head_dim);
      w.take(v, p_.packed_keys * p_.kv_heads * p_.value_dim);
      for (int i = 0; i < workers; ++i) layout(w, scratch[i]);
    });
    fill_labels(p_, team_, key_labels_, query_labels_);
    for_each(team_, heads * blocks, [&](int64_t item, int worker) {
      const int64_t j = item % blocks * kBlock, kv = item / blocks % p_.kv_heads;
      const Sequence& s = p_.sequence[item / blocks / p_.kv_heads];
      if (j >= s.lk) return;
      const int64_t n = lesser(kBlock, s.lk - j), at = kv * p_.packed_keys + s.key_pad + j;
      pack_transposed<Op>(key_rows(p_, p_.k, s, kv, j, n, p_.head_dim), kBlock, T{1},
                          k + at * p_.head_dim, scratch[worker].fetch);
      pack_transposed<Op>(key_rows(p_, p_.v, s, kv, j, n, p_.value_dim), kBlock, T{1},
                          v + at * p_.value_dim, scratch[worker].fetch);
    });
    for_each(team_, tiles, [&](int64_t item, int worker) {
      const int64_t column = item % column_tiles, row = item / column_tiles % row_tiles;
      const int64_t h = item / column_tiles / row_tiles % p_.bias_head;
      tile(item / column_tiles / row_tiles / p_.bias_head, h, row, column, k, v, scratch[worker]);
    });
  }

 private:
  struct Scratch {
    T *q, *g;        // [Op::kRows][..]
    T *s, *dp;       // [Op::kRows][kGroup<Op>]
    T *bias, *drop;  // [kGroup<Op>]
    T* fetch;
    double* sum;  // [kRowBlock<Op>][kGroup<Op>]
  };

  void layout(Workspace& w, Scratch& t) {
    w.take(t.q, Op::kRows * q_ld_);
    w.take(t.g, Op::kRows * g_ld_);
    w.take(t.s, Op::kRows * kGroup<Op>);
    w.take(t.dp, Op::kRows * kGroup<Op>);
    w.take(t.bias, kGroup<Op>);
    w.take(t.drop, kGroup<Op>);
    w.take(t.fetch, kLanes<T> * scratch_of<Op>(greater(p_.head_dim, p_.value_dim)));
    w.take(t.sum, kRowBlock<Op> * kGroup<Op>);
  }

  // One tile of d(bias): every (sequence, head, rows, keys) that was broadcast from it.
  void tile(int64_t batch, int64_t head, int64_t row, int64_t column, const T* k, const T* v,
            Scratch& t) {
    const bool all_rows = p_.bias_row == 1, all_columns = p_.bias_column == 1;
    const int64_t r0 = all_rows ? 0 : row * kRowBlock<Op>,
                  c0 = all_columns ? 0 : column * kGroup<Op>;
    const int64_t r1 = all_rows ? p_.max_lq : lesser(r0 + kRowBlock<Op>, p_.max_lq);
    const int64_t c1 = all_columns ? p_.max_lk : lesser(c0 + kGroup<Op>, p_.max_lk);
    for (int64_t x = 0; x < kRowBlock<Op> * kGroup<Op>; ++x) t.sum[x] = 0;

    const int64_t s0 = p_.bias_batch == 1 ? 0 : batch, h0 = p_.bias_head == 1 ? 0 : head;
    const int64_t s1 = p_.bias_batch == 1 ? p_.sequences : batch + 1;
    const int64_t h1 = p_.bias_head == 1 ? p_.q_heads : head + 1;
    for (int64_t s = s0; s < s1; ++s)
      for (int64_t h = h0; h < h1; ++h) {
        const int64_t at = h / group_ * p_.packed_keys + p_.sequence[s].key_pad;
        for (int64_t i = r0; i < lesser(r1, p_.sequence[s].lq); i += Op::kRows)
          for (int64_t j = c0; j < lesser(c1, p_.sequence[s].lk); j += kGroup<Op>)
            strip(s, h, i, lesser<int64_t>(Op::kRows, p_.sequence[s].lq - i), j,
                  k + at * p_.head_dim, v + at * p_.value_dim, all_rows ? -1 : i - r0, all_columns,
                  t);
      }

    // past the sequence's keys nothing was added, so the zeros there are right, too
    const int64_t columns = all_columns ? 1 : lesser(kGroup<Op>, p_.bias_column - c0);
    const int64_t rows = all_rows ? 1 : lesser(kRowBlock<Op>, p_.bias_row - r0);
    for (int64_t r = 0; r < rows; ++r) {
      char* to = mutable_row_of(p_.dbias, batch, head, r0 + r) +
                 c0 * p_.dbias.column * bytes_of(p_.dbias.dtype);
      T line[kGroup<Op>];
      for (int64_t c = 0; c < columns; ++c) line[c] = static_cast<T>(t.sum[r * kGroup<Op> + c]);
      store_row(line, columns, T{1}, to, p_.dbias.dtype, p_.dbias.column);
    }
  }

  // n queries from i against the group of keys from j.  `row` is their first row of the tile, or
  // -1.
  void strip(int64_t sequence, int64_t h, int64_t i, int64_t n, int64_t j, const T* k, const T* v,
             int64_t row, bool all_columns, Scratch& t) {
    const Sequence& s = p_.sequence[sequence];
    const Labels<T> key_labels = key_labels_.from(s.key_pad);
    const Labels<T> query_labels = query_labels_.from(s.row_pad);
    const Head<T> head(p_, sequence, h, key_labels, query_labels);
    const Dropout<T> dropout(p_, h, sequence);
    const int64_t columns = ceil_to(lesser(kGroup<Op>, s.lk - j), kLanes<T>);
    copy_rows<Op>(Rows{&p_.q, s.entry, h, s.q0 + i, n, p_.head_dim}, Op::kRows,
                  static_cast<T>(p_.scale), t.q, q_ld_);
    copy_rows<Op>(Rows{&p_.dout, s.entry, h, s.q0 + i, n, p_.value_dim}, Op::kRows, T{1}, t.g,
                  g_ld_);
    product<Op>(t.q, q_ld_, k + j * p_.head_dim, kPanel<T> * p_.head_dim, p_.head_dim, t.s,
                kGroup<Op>, columns);
    product<Op>(t.g, g_ld_, v + j * p_.value_dim, kPanel<T> * p_.value_dim, p_.value_dim, t.dp,
                kGroup<Op>, columns);
    for (int64_t m = 0; m < n; ++m) {
      const int64_t at = (s.entry * p_.q_heads + h) * p_.q_rows + s.q0 + i + m;
      const T lse = static_cast<const T*>(p_.lse)[at];
      if (lse == -kInfinity<T>) continue;
      const T low = p_.low ? static_cast<const T*>(p_.low)[at] : T{0};
      const T delta = delta_of<T>(p_, s.entry, h, s.q0 + i + m);
      T* score = t.s + m * kGroup<Op>;
      T* dp = t.dp + m * kGroup<Op>;
      for (int64_t x = 0; x < columns; x += kBlock)
        head.row(i + m, j + x, lesser(kBlock, columns - x), score + x, t.bias);
      if (dropout.active) {
        dropout.row(i + m, j, columns, t.drop);
        for (int64_t x = 0; x < columns; x += kLanes<T>)
          store(dp + x, load(dp + x) * load(t.drop + x));
      }
      double* sum = t.sum + greater<int64_t>(row, 0) * kGroup<Op> + (row < 0 ? 0 : m * kGroup<Op>);
      for (int64_t x = 0; x < columns; x += kLanes<T>) {
        const Vec<T> w = exp2((load(score + x) - lse) * kLog2e<T> - low);
        const Vec<T> ds = select<T>(w == Vec<T>{}, Vec<T>{}, w * (load(dp + x) - delta));
        for (int l = 0; l < kLanes<T>; ++l) sum[all_columns ? 0 : x + l] += ds[l];
      }
    }
  }

  const AttentionParams& p_;
  const Team& team_;
  int64_t group_, q_ld_, g_ld_;
  Labels<T> key_labels_, query_labels_;
};
