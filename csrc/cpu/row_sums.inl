// low = log2(sum over the keys that a row sees of exp(s - lse)): 0, but for the rounding of lse.
//
// A float near 1e9 has no digits left for log(n), so that where a mask of -1e9 (or of the lowest
// float) covers a whole row, exp(s - lse) is 1 for every key.  Rows with so coarse an lse are
// summed again before the backward pass: p = exp(s - lse) / 2^low.

template <class T>
class RowSums {
 public:
  RowSums(const AttentionParams& p, const Team& team)
      : p_(p), team_(team), group_(p.q_heads / greater<int64_t>(p.kv_heads, 1)) {}

  // Fills p.low, which is all 0, where |lse| is coarse and finite.
  void run() {
    Workspace workspace([&](Workspace& w) {
      key_labels_.layout(w, p_.packed_keys, p_.keep, p_.k_segments);
      query_labels_.layout(w, p_.packed_rows, false, p_.q_segments);
    });
    fill_labels(p_, team_, key_labels_, query_labels_);
    for_each(team_, p_.sequences * p_.q_heads, [&](int64_t item, int) {
      const int64_t sequence = item / p_.q_heads, h = item % p_.q_heads;
      const Sequence& s = p_.sequence[sequence];
      const Labels<T> key_labels = key_labels_.from(s.key_pad);
      const Labels<T> query_labels = query_labels_.from(s.row_pad);
      const Head<T> head(p_, sequence, h, key_labels, query_labels);
      const int64_t first = (s.entry * p_.q_heads + h) * p_.q_rows + s.q0;
      for (int64_t i = 0; i < s.lq; ++i) {
        const T lse = static_cast<const T*>(p_.lse)[first + i];
        const T size = lse < 0 ? -lse : lse;
        if (size >= kCoarse<T> && size < kInfinity<T>)
          static_cast<T*>(p_.low)[first + i] = log_of(sum(head, s, h, i, lse)) * kLog2e<T>;
      }
    });
  }

 private:
  T sum(const Head<T>& head, const Sequence& s, int64_t h, int64_t i, T lse) const {
    T line[kBlock], bias[kBlock];
    T total = 0;
    if (p_.sinks) total = exp2(splat((static_cast<T>(p_.sinks[h]) - lse) * kLog2e<T>))[0];
    const char* q = row_of(p_.q, s.entry, h, s.q0 + i);
    const int64_t end = head.last_key(i + 1);
    for (int64_t j = floor_to(head.first_key(i), kBlock); j < end; j += kBlock) {
      if (!head.any(i, i + 1, j / kBlock)) continue;
      for (int64_t x = 0; x < kBlock; ++x)
        line[x] = j + x < end
                      ? static_cast<T>(p_.scale) *
                            dot_of_rows<T>(q, p_.q, row_of(p_.k, s.entry, h / group_, s.k0 + j + x),
                                           p_.k, p_.head_dim)
                      : T{0};
      head.row(i, j, kBlock, line, bias);
      Vec<T> part{};
      for (int64_t x = 0; x < kBlock; x += kLanes<T>)
        part += exp2((load(line + x) - lse) * kLog2e<T>);
      total += sum_lanes<T>(part);
    }
    return total;
  }

  const AttentionParams& p_;
  const Team& team_;
  int64_t group_;
  Labels<T> key_labels_, query_labels_;
};
