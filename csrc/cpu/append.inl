// New keys and values into a cache: rotated and quantised, if asked for, on their way; and the
// queries that come with them, rotated likewise.

template <class T>
class Append {
 public:
  Append(const AppendParams& p, const Team& team) : p_(p), team_(team) {}

  void run() {
    const int64_t tokens = p_.sequences * p_.heads * p_.tokens;
    const int64_t items = tokens + p_.sequences * p_.q_heads * p_.q_rows;
    const int workers = static_cast<int>(lesser<int64_t>(team_.threads, items));
    const int64_t ld = ceil_to(greater(p_.head_dim, p_.value_dim), kLanes<T>);
    T* lines = nullptr;
    Workspace workspace([&](Workspace& w) { w.take(lines, greater(workers, 1) * ld); });
    for_each(team_, items, [&](int64_t item, int worker) {
      T* line = lines + worker * ld;
      if (item < tokens)
        return token(item / p_.tokens / p_.heads, item / p_.tokens % p_.heads, item % p_.tokens,
                     line);
      item -= tokens;
      query(item / p_.q_rows / p_.q_heads, item / p_.q_rows % p_.q_heads, item % p_.q_rows, line);
    });
  }

 private:
  void token(int64_t b, int64_t h, int64_t t, T* line) {
    const int64_t slot = p_.lengths[b] + t, row = slot % p_.pages.rows;
    const int64_t page = p_.pages.table[b * p_.pages.width + slot / p_.pages.rows];
    load_row(row_of(p_.k, b, h, t), p_.k.dtype, p_.k.column, p_.head_dim, line);
    if (p_.cos) rotate(slot, line);
    put(line, p_.head_dim, p_.k_cache, p_.k_scale, page, h, row);
    load_row(row_of(p_.v, b, h, t), p_.v.dtype, p_.v.column, p_.value_dim, line);
    put(line, p_.value_dim, p_.v_cache, p_.v_scale, page, h, row);
  }

  void query(int64_t b, int64_t h, int64_t t, T* line) {
    load_row(row_of(p_.q, b, h, t), p_.q.dtype, p_.q.column, p_.head_dim, line);
    rotate(p_.lengths[b] + t * p_.q_step, line);
    store_row(line, p_.head_dim, T{1}, mutable_row_of(p_.q_rotated, b, h, t), p_.q.dtype,
              p_.q_rotated.column);
  }

  // Pairs are dimensions (2 i, 2 i + 1), or (i, i + half).
  void rotate(int64_t position, T* x) const {
    const int64_t half = p_.rotary_dim / 2;
    const T* cos = static_cast<const T*>(p_.cos) + position * half;
    const T* sin = static_cast<const T*>(p_.sin) + position * half;
    const int64_t step = p_.interleaved ? 2 : 1, apart = p_.interleaved ? 1 : half;
    for (int64_t i = 0; i < half; ++i, x += step) {
      const T a = x[0], b = x[apart];
      x[0] = a * cos[i] - b * sin[i];
      x[apart] = b * cos[i] + a * sin[i];
    }
  }

  static void put(const T* line, int64_t n, const Array& cache, const Array& scales, int64_t page,
                  int64_t h, int64_t row) {
    char* to = mutable_row_of(cache, page, h, row);
    if (!scales.data) return store_row(line, n, T{1}, to, cache.dtype, cache.column);
    if constexpr (sizeof(T) == 4) {
      const float scale = quantise(line, n, cache.dtype, cache.column, to);
      __builtin_memcpy(mutable_row_of(scales, page, h, row), &scale, sizeof scale);
    }
  }

  // The largest magnitude becomes the largest number there is.  A row with NaN or infinity in it
  // has the scale NaN: it must not pass for a good one.
  static float quantise(const T* line, int64_t n, DType dtype, int64_t stride, char* to) {
    const bool whole = dtype == DType::kInt8;
    float largest = 0, spoilt = 0;
    for (int64_t d = 0; d < n; ++d) {
      largest = greater(largest, __builtin_fabsf(line[d]));
      spoilt += line[d] * 0.f;
    }
    const float scale = largest / (whole ? kLargestInt8 : kLargestFp8) + spoilt;
    for (int64_t d = 0; d < n; ++d) {
      const float x = scale > 0 ? line[d] / scale : 0.f;
      to[d * stride] = static_cast<char>(whole ? to_int8(x) : to_fp8(x));
    }
    return scale;
  }

  const AppendParams& p_;
  const Team& team_;
};
