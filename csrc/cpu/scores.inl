// From q.k to the logits of the softmax: softcap, ALiBi, bias, and the masks.
//
// The forward pass meets scores by rows (one query, keys along the lanes), the backward pass by
// columns (one key, queries along the lanes); both are a Line here.

enum BlockState : uint8_t { kHidden = 0, kPartly = 1, kVisible = 2 };

// What `keep` and `segments` say about one sequence, one entry per key (or query), padded with
// hidden entries to whole blocks.
template <class T>
struct Labels {
  using Int = typename Simd<T>::Int;
  Int* keep = nullptr;        // -1 visible, 0 hidden; nullptr: all visible
  Int* segment = nullptr;     // nullptr: none
  uint8_t* state = nullptr;   // per block of kBlock, of `keep`
  int32_t* lowest = nullptr;  // per block, of `segment`
  int32_t* highest = nullptr;

  Labels from(int64_t start) const {
    Labels r = *this;
    if (keep) r.keep += start, r.state += start / kBlock;
    if (segment) r.segment += start, r.lowest += start / kBlock, r.highest += start / kBlock;
    return r;
  }

  void layout(Workspace& w, int64_t entries, bool with_keep, bool with_segments) {
    if (with_keep) w.take(keep, entries), w.take(state, entries / kBlock);
    if (with_segments)
      w.take(segment, entries), w.take(lowest, entries / kBlock), w.take(highest, entries / kBlock);
  }

  void fill(const uint8_t* keep_from, const int32_t* segment_from, int64_t n) {
    for (int64_t block = 0; block < n; block += kBlock) {
      const int64_t m = lesser(kBlock, n - block);
      if (keep) {
        int64_t seen = 0;
        for (int64_t x = block; x < block + kBlock; ++x) {
          keep[x] = x < n && keep_from[x] ? -1 : 0;
          seen -= keep[x];
        }
        state[block / kBlock] = seen == 0 ? kHidden : seen == m ? kVisible : kPartly;
      }
      if (segment) {
        int32_t low = segment_from[block], high = low;
        for (int64_t x = block; x < block + kBlock; ++x) {
          const int32_t id = segment_from[lesser(x, n - 1)];
          segment[x] = id;
          low = lesser(low, id);
          high = greater(high, id);
        }
        lowest[block / kBlock] = low;
        highest[block / kBlock] = high;
      }
    }
  }
};

// The labels of all sequences of a call.
template <class T>
void fill_labels(const AttentionParams& p, const Team& team, Labels<T>& keys, Labels<T>& queries) {
  if (!p.keep && !p.k_segments) return;
  for_each(team, p.sequences, [&](int64_t i, int) {
    const Sequence& s = p.sequence[i];
    const int64_t k = s.entry * p.k_rows + s.k0, q = s.entry * p.q_rows + s.q0;
    Labels<T> to = keys.from(s.key_pad);
    to.fill(p.keep ? p.keep + k : nullptr, p.k_segments ? p.k_segments + k : nullptr, s.lk);
    to = queries.from(s.row_pad);
    to.fill(nullptr, p.q_segments ? p.q_segments + q : nullptr, s.lq);
  });
}

template <class T>
struct Line {
  using Int = typename Simd<T>::Int;
  int64_t first;                 // index of lane 0
  int64_t n;                     // lanes, whole vectors
  int64_t begin, end;            // visible indices by the band and the lengths
  int64_t centre;                // ALiBi: distance |index - centre|
  const Int* keep = nullptr;     // of lane 0, or nullptr
  const Int* segment = nullptr;  // of lane 0, or nullptr
  Int id = 0;                    // the segment that this line belongs to
  const char* bias = nullptr;    // of lane 0, or nullptr
  DType bias_dtype = DType::kFloat32;
  bool hidden = false;  // the whole line
};

template <class T>
constexpr DType kOwnDType = sizeof(T) == 4 ? DType::kFloat32 : DType::kFloat64;

// Whether load_bias can read it where it lies.
template <class T>
ATTNKIT_INLINE bool readable(DType dtype) {
  return (sizeof(T) == 8) == (dtype == DType::kFloat64);
}
template <class T>
ATTNKIT_INLINE Vec<T> load_bias(const char* from, DType dtype) {
  if constexpr (sizeof(T) == 4) {
    if (dtype == DType::kBFloat16) return load_bf16(reinterpret_cast<const uint16_t*>(from));
    if (dtype == DType::kFloat16) return load_fp16(reinterpret_cast<const uint16_t*>(from));
    if (dtype == DType::kBool) return load_bool(reinterpret_cast<const uint8_t*>(from));
  }
  return load(reinterpret_cast<const T*>(from));
}

// Scale, softcap, ALiBi and bias on `s`, in place.  `slope`, if given, receives
// d(logit)/d(scaled score).
template <class T>
void change_values(const Line<T>& line, T scale, T softcap, T alibi, T* s, T* slope) {
  const Vec<T> none = splat(-kInfinity<T>);
  const T inverse = softcap > 0 ? scale / softcap : T{0};
  const int64_t bias_step = bytes_of(line.bias_dtype);
  IntVec<T> d = iota<T>(line.first - line.centre);
  for (int64_t x = 0; x < line.n; x += kLanes<T>, d += kLanes<T>) {
    Vec<T> v = load(s + x);
    if (softcap > 0) {
      const Vec<T> t = tanh(v * inverse);
      v = t * softcap;
      if (slope) store(slope + x, 1 - t * t);
    } else {
      v *= scale;
    }
    if (alibi != 0) v -= alibi * __builtin_convertvector(d < 0 ? -d : d, Vec<T>);
    if (line.bias) {
      const Vec<T> b = load_bias<T>(line.bias + x * bias_step, line.bias_dtype);
      v = select<T>(b == none, none, v + b);  // a bias of -inf hides, even from a score that is NaN
    }
    store(s + x, v);
  }
}

template <class T>
void hide(const Line<T>& line, bool edge, T* s) {
  using Int = typename Simd<T>::Int;
  const Vec<T> none = splat(-kInfinity<T>);
  const Int begin = static_cast<Int>(greater<int64_t>(line.begin - line.first, 0));
  const Int end = static_cast<Int>(greater<int64_t>(lesser(line.end - line.first, line.n), 0));
  IntVec<T> index = iota<T>(0);
  for (int64_t x = 0; x < line.n; x += kLanes<T>, index += kLanes<T>) {
    Vec<T> v = load(s + x);
    if (edge) v = select<T>((index >= begin) & (index < end), v, none);
    if (line.keep) v = select<T>(load_int<T>(line.keep + x), v, none);
    if (line.segment) v = select<T>(load_int<T>(line.segment + x) == line.id, v, none);
    store(s + x, v);
  }
}

// From scores to logits, in place.
template <class T>
void finish_scores(const Line<T>& line, T scale, T softcap, T alibi, T* s, T* slope) {
  if (line.hidden) {
    for (int64_t x = 0; x < line.n; x += kLanes<T>) store(s + x, splat(-kInfinity<T>));
    return;
  }
  if (scale != 1 || softcap > 0 || alibi != 0 || line.bias)
    change_values(line, scale, softcap, alibi, s, slope);
  const bool edge = line.begin > line.first || line.end < line.first + line.n;
  if (edge || line.keep || line.segment) hide(line, edge, s);
}

// The masks and score terms of one (sequence, query head).
template <class T>
class Head {
 public:
  Head(const AttentionParams& p, int64_t sequence, int64_t head, const Labels<T>& keys,
       const Labels<T>& queries)
      : p_(p),
        s_(p.sequence[sequence]),
        head_(head),
        keys_(keys),
        queries_(queries),
        softcap_(static_cast<T>(p.softcap)),
        alibi_(p.alibi ? static_cast<T>(p.alibi[sequence * p.q_heads + head]) : T{0}),
        blocks_(p.blocks ? p.blocks + s_.entry * p.block_batch + head * p.block_head : nullptr) {}

  bool changes_values() const { return softcap_ > 0 || alibi_ != 0 || p_.bias.data; }
  bool has_softcap() const { return softcap_ > 0; }

  // Keys that some query in [i, i_end) may see by the band and the lengths.
  int64_t first_key(int64_t i) const { return greater<int64_t>(0, i + s_.lo); }
  int64_t last_key(int64_t i_end) const { return lesser(s_.lk, i_end - 1 + s_.hi + 1); }
  // Queries that may see some key in [j, j_end).
  int64_t first_query(int64_t j) const { return greater<int64_t>(0, j - s_.hi); }
  int64_t last_query(int64_t j_end) const { return lesser(s_.lq, j_end - 1 - s_.lo + 1); }

  // Whether anything in these queries and this block of keys can be visible.
  bool any(int64_t i, int64_t i_end, int64_t key_block) const {
    if (keys_.keep && keys_.state[key_block] == kHidden) return false;
    if (keys_.segment && !segments_meet(i, i_end, key_block)) return false;
    if (blocks_) {
      bool on = false;
      for (int64_t b = i / kBlock; b <= (i_end - 1) / kBlock; ++b) on |= flag(b, key_block);
      return on;
    }
    return true;
  }

  // Whether every one of these queries sees every one of these keys, and no value changes.
  bool plain(int64_t i, int64_t i_end, int64_t j, int64_t j_end) const {
    return !changes_values() && j - (i_end - 1) >= s_.lo && j_end - 1 - i <= s_.hi &&
           j_end <= s_.lk && !(keys_.keep && keys_.state[j / kBlock] != kVisible) &&
           !keys_.segment && !blocks_;
  }

  // Query i against n keys from j, all in one block.  `bias` has room for n values.
  void row(int64_t i, int64_t j, int64_t n, T* s, T* bias, T scale = T{1}) const {
    Line<T> line{j, n, first_key(i), last_key(i + 1), i + s_.off};
    if (keys_.keep) line.keep = keys_.keep + j;
    if (keys_.segment) line.segment = keys_.segment + j, line.id = queries_.segment[i];
    line.hidden = blocks_ && !flag(i / kBlock, j / kBlock);
    const Array& b = p_.bias;
    if (b.data && b.column == 1 && j + n <= s_.lk && readable<T>(b.dtype)) {
      line.bias = row_of(b, s_.entry, head_, i) + j * bytes_of(b.dtype);
      line.bias_dtype = b.dtype;
    } else if (b.data) {
      bias_row(i, j, n, bias);
      line.bias = reinterpret_cast<const char*>(bias);
      line.bias_dtype = kOwnDType<T>;
    }
    finish_scores(line, scale, softcap_, alibi_, s, static_cast<T*>(nullptr));
  }

  // Key j against n queries from i, all in one block.  `bias` is the matching line, or nullptr.
  void column(int64_t j, int64_t i, int64_t n, T* s, const T* bias, T* slope, T scale) const {
    Line<T> line{i, n, first_query(j), last_query(j + 1), j - s_.off};
    line.hidden =
        j >= s_.lk || (keys_.keep && !keys_.keep[j]) || (blocks_ && !flag(i / kBlock, j / kBlock));
    if (queries_.segment && !line.hidden)
      line.segment = queries_.segment + i, line.id = keys_.segment[j];
    line.bias = reinterpret_cast<const char*>(bias);
    line.bias_dtype = kOwnDType<T>;
    finish_scores(line, scale, softcap_, alibi_, s, slope);
  }

  // The bias of keys [j, j + n) for query i, in `to`; past the last key it is 0.
  void bias_row(int64_t i, int64_t j, int64_t n, T* to) const {
    const Array& b = p_.bias;
    const char* row = row_of(b, s_.entry, head_, i) + j * b.column * bytes_of(b.dtype);
    const int64_t real = lesser(n, s_.lk - j);
    load_row(row, b.dtype, b.column, real, to);
    for (int64_t x = greater<int64_t>(real, 0); x < n; ++x) to[x] = T{0};
  }

 private:
  bool segments_meet(int64_t i, int64_t i_end, int64_t key_block) const {
    for (int64_t b = i / kBlock; b <= (i_end - 1) / kBlock; ++b)
      if (queries_.lowest[b] <= keys_.highest[key_block] &&
          keys_.lowest[key_block] <= queries_.highest[b])
        return true;
    return false;
  }
  bool flag(int64_t row_block, int64_t key_block) const {
    return blocks_[row_block * p_.block_row + key_block];
  }

  const AttentionParams& p_;
  const Sequence& s_;
  int64_t head_;
  const Labels<T>& keys_;
  const Labels<T>& queries_;
  T softcap_, alibi_;
  const uint8_t* blocks_;
};
