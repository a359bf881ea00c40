// From strided tensors of any dtype to the packed operands of gemm.inl, and back.

ATTNKIT_INLINE int64_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kFloat64:
      return 8;
    case DType::kBool:
    case DType::kInt8:
    case DType::kFloat8:
      return 1;
    default:
      return 2;
  }
}

// Start of a row.
ATTNKIT_INLINE const char* row_of(const Array& a, int64_t batch, int64_t head, int64_t row) {
  return static_cast<const char*>(a.data) +
         (batch * a.batch + head * a.head + row * a.row) * bytes_of(a.dtype);
}
ATTNKIT_INLINE char* mutable_row_of(const Array& a, int64_t batch, int64_t head, int64_t row) {
  return const_cast<char*>(row_of(a, batch, head, row));
}

// ---------------------------------------------------------------- one row

template <class T>
ATTNKIT_INLINE T load_scalar(const char* p, DType dtype) {
  uint16_t half;
  float single;
  double full;
  switch (dtype) {
    case DType::kBFloat16:
      __builtin_memcpy(&half, p, 2);
      return static_cast<T>(from_bf16(half));
    case DType::kFloat16:
      __builtin_memcpy(&half, p, 2);
      return static_cast<T>(from_fp16(half));
    case DType::kFloat64:
      __builtin_memcpy(&full, p, 8);
      return static_cast<T>(full);
    case DType::kBool:
      return *p ? T{0} : -kInfinity<T>;  // a boolean mask as a bias: True = attend
    default:
      __builtin_memcpy(&single, p, 4);
      return static_cast<T>(single);
  }
}

// 0 where a boolean mask says True, else -inf.
ATTNKIT_INLINE Vec<float> load_bool(const uint8_t* from) {
  typedef uint8_t Bytes __attribute__((vector_size(kVectorBytes / 4)));
  Bytes b;
  __builtin_memcpy(&b, from, sizeof b);
  const IntVec<float> on = __builtin_convertvector(b, IntVec<float>);
  return select<float>(on != 0, Vec<float>{}, splat(-kInfinity<float>));
}

// Values `stride` elements apart, as T.
template <class T>
void load_row(const char* from, DType dtype, int64_t stride, int64_t n, T* to) {
  if (n <= 0) return;  // a tensor without elements may have no memory at all
  int64_t d = 0;
  if (stride == 1) {
    if constexpr (sizeof(T) == 4) {
      constexpr int kStep = kLanes<float>;
      const auto* half = reinterpret_cast<const uint16_t*>(from);
      if (dtype == DType::kFloat32)
        for (; d + kStep <= n; d += kStep)
          store(to + d, load(reinterpret_cast<const float*>(from) + d));
      else if (dtype == DType::kBFloat16)
        for (; d + kStep <= n; d += kStep) store(to + d, load_bf16(half + d));
      else if (dtype == DType::kFloat16)
        for (; d + kStep <= n; d += kStep) store(to + d, load_fp16(half + d));
      else if (dtype == DType::kBool)
        for (; d + kStep <= n; d += kStep)
          store(to + d, load_bool(reinterpret_cast<const uint8_t*>(from) + d));
    } else if (dtype == DType::kFloat64) {
      __builtin_memcpy(to, from, n * 8);
      d = n;
    }
  }
  const int64_t step = stride * bytes_of(dtype);
  for (; d < n; ++d) to[d] = load_scalar<T>(from + d * step, dtype);
}

// bfloat16 values, as they are.
inline void load_row(const char* from, DType, int64_t stride, int64_t n, uint16_t* to) {
  if (n <= 0) return;
  if (stride == 1) {
    __builtin_memcpy(to, from, n * 2);
    return;
  }
  for (int64_t d = 0; d < n; ++d) __builtin_memcpy(to + d, from + d * stride * 2, 2);
}

template <class T>
void store_row(const T* from, int64_t n, T factor, char* to, DType dtype, int64_t stride) {
  const Vec<T> f = splat(factor);
  int64_t d = 0;
  if (stride == 1) {
    constexpr int kStep = kLanes<T>;
    if constexpr (sizeof(T) == 4) {
      auto* half = reinterpret_cast<uint16_t*>(to);
      if (dtype == DType::kFloat32)
        for (; d + kStep <= n; d += kStep)
          store(reinterpret_cast<float*>(to) + d, load(from + d) * f);
      else if (dtype == DType::kBFloat16)
        for (; d + kStep <= n; d += kStep) store_bf16(half + d, load(from + d) * f);
      else
        for (; d + kStep <= n; d += kStep) store_fp16(half + d, load(from + d) * f);
    } else if (dtype == DType::kFloat64) {
      for (; d + kStep <= n; d += kStep)
        store(reinterpret_cast<double*>(to) + d, load(from + d) * f);
    }
  }
  for (; d < n; ++d) {
    char* p = to + d * stride * bytes_of(dtype);
    const T x = from[d] * factor;
    if (dtype == DType::kBFloat16) {
      const uint16_t h = to_bf16(static_cast<float>(x));
      __builtin_memcpy(p, &h, 2);
    } else if (dtype == DType::kFloat16) {
      const uint16_t h = to_fp16(static_cast<float>(x));
      __builtin_memcpy(p, &h, 2);
    } else if (dtype == DType::kFloat32) {  // also d(bias) of float64 tensors
      const float single = static_cast<float>(x);
      __builtin_memcpy(p, &single, 4);
    } else {
      const double wide = static_cast<double>(x);
      __builtin_memcpy(p, &wide, 8);
    }
  }
}

// ---------------------------------------------------------------- many rows

// Which rows of an array to pack, and what to make of them.
struct Rows {
  const Array* array;
  int64_t batch, head, first, count, width;
  const uint8_t* keep = nullptr;  // a row with keep == 0 counts as zero, whatever it holds
};

// 0 where every value is finite.  x * 0 is NaN for NaN and infinities, and costs one operation.
template <class T>
ATTNKIT_INLINE bool all_finite(const T* x, int64_t n) {
  Vec<T> sum{};
  int64_t d = 0;
  for (; d + kLanes<T> <= n; d += kLanes<T>) sum += load(x + d) * T{0};
  T rest = sum_lanes<T>(sum);
  for (; d < n; ++d) rest += x[d] * T{0};
  return rest == T{0};
}
ATTNKIT_INLINE bool all_finite(const uint16_t* x, int64_t n) {  // bfloat16
  typedef uint16_t Words __attribute__((vector_size(kVectorBytes)));
  constexpr int64_t kStep = kVectorBytes / 2;
  constexpr uint16_t kExponent = 0x7f80;
  Words w, special{};
  int64_t d = 0;
  for (; d + kStep <= n; d += kStep) {
    __builtin_memcpy(&w, x + d, sizeof w);
    special |= reinterpret_cast<Words>((w & kExponent) == kExponent);
  }
  uint64_t parts[kVectorBytes / 8], any = 0;
  __builtin_memcpy(parts, &special, sizeof parts);
  for (uint64_t part : parts) any |= part;
  for (; d < n; ++d) any |= (x[d] & kExponent) == kExponent;
  return any == 0;
}

template <class Element>
ATTNKIT_INLINE void scale_row(Element* row, int64_t n, Element factor) {
  if (factor != Element{1})
    for (int64_t d = 0; d < n; ++d) row[d] *= factor;
}

// The row of the next head, where heads lie side by side: whoever comes to that head will find its
// rows far apart, which no hardware foresees.
ATTNKIT_INLINE void fetch_next_head(const char* row, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(row + b, 0, 2);
}

// Row `r` of `rows`, zero-padded to `padded`, times `factor` (ignored for pairs, which stay exact).
template <class Op>
ATTNKIT_INLINE bool fetch_row(const Rows& rows, int64_t r, int64_t padded, typename Op::Real factor,
                              typename Op::Element* to) {
  using Element = typename Op::Element;
  int64_t n = 0;
  bool finite = true;
  if (r < rows.count && (!rows.keep || rows.keep[r])) {
    n = rows.width;
    const Array& a = *rows.array;
    const char* from = row_of(a, rows.batch, rows.head, rows.first + r);
    load_row(from, a.dtype, a.column, n, to);
    if (a.head < a.row) fetch_next_head(from + a.head * bytes_of(a.dtype), n * bytes_of(a.dtype));
    finite = all_finite(to, n);
    if constexpr (Op::kPair == 1) scale_row(to, n, factor);
  }
  for (int64_t d = n; d < padded; ++d) to[d] = Element{0};
  return finite;
}

// Row-major copy: to[rounded count][ld].
template <class Op>
bool copy_rows(const Rows& rows, int64_t rounded, typename Op::Real factor,
               typename Op::Element* to, int64_t ld) {
  bool finite = true;
  for (int64_t r = 0; r < rounded; ++r) finite &= fetch_row<Op>(rows, r, ld, factor, to + r * ld);
  return finite;
}

template <class T, bool kUpper, int... kIndex>
ATTNKIT_INLINE IntVec<T> interleave(IntVec<T> a, IntVec<T> b,
                                    std::integer_sequence<int, kIndex...>) {
  constexpr int kN = kLanes<T>;
  return __builtin_shufflevector(a, b,
                                 (kUpper ? kN / 2 : 0) + kIndex / 2 + (kIndex % 2 ? kN : 0)...);
}

// A square of lanes: log2(n) rounds of perfect shuffles.
template <class T>
ATTNKIT_INLINE void transpose(IntVec<T> (&r)[kLanes<T>]) {
  constexpr int kN = kLanes<T>;
  constexpr auto kAll = std::make_integer_sequence<int, kN>{};
#pragma GCC unroll 4
  for (int round = 1; round < kN; round *= 2) {
    IntVec<T> t[kN];
#pragma GCC unroll 16
    for (int i = 0; i < kN / 2; ++i) {
      t[2 * i] = interleave<T, false>(r[i], r[i + kN / 2], kAll);
      t[2 * i + 1] = interleave<T, true>(r[i], r[i + kN / 2], kAll);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kN; ++i) r[i] = t[i];
  }
}

// Lane l of the result is the sum of the lanes of v[l]: rounds of perfect shuffles that add.
template <class T>
ATTNKIT_INLINE Vec<T> sums_of(Vec<T> (&v)[kLanes<T>]) {
  constexpr int kN = kLanes<T>;
  constexpr auto kAll = std::make_integer_sequence<int, kN>{};
#pragma GCC unroll 4
  for (int half = kN / 2; half > 0; half /= 2)
#pragma GCC unroll 16
    for (int i = 0; i < half; ++i) {
      const auto a = reinterpret_cast<IntVec<T>>(v[i]);
      const auto b = reinterpret_cast<IntVec<T>>(v[i + half]);
      v[i] = reinterpret_cast<Vec<T>>(interleave<T, false>(a, b, kAll)) +
             reinterpret_cast<Vec<T>>(interleave<T, true>(a, b, kAll));
    }
  return v[0];
}

// to[j][i] = from[i][j], a square of lanes.
template <class T>
ATTNKIT_INLINE void transpose_square(const T* from, int64_t ld, T* to, int64_t to_ld) {
  IntVec<T> square[kLanes<T>];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<T>; ++i) __builtin_memcpy(&square[i], from + i * ld, kVectorBytes);
  transpose<T>(square);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<T>; ++i) __builtin_memcpy(to + i * to_ld, &square[i], kVectorBytes);
}

// Depth of a transposed panel: the width, rounded up to what a product takes.
template <class Op>
ATTNKIT_INLINE int64_t depth_of(int64_t width) {
  return ceil_to(width, Op::kDepth);
}
// Elements that one row needs in `fetch` scratch: whole vectors of it are read.
template <class Op>
ATTNKIT_INLINE int64_t scratch_of(int64_t width) {
  return ceil_to(width, kVectorBytes / static_cast<int64_t>(sizeof(typename Op::Element)));
}

// Rows as columns: panels [rounded / kPanel][depth][kPanel] (pairs of the depth side by side).
// `scratch` holds kLanes rows of scratch_of(width).
template <class Op>
bool pack_transposed(const Rows& rows, int64_t rounded, typename Op::Real factor,
                     typename Op::Element* to, typename Op::Element* scratch) {
  using T = typename Op::Real;
  using Word = typename Simd<T>::Int;
  const int64_t depth = depth_of<Op>(rows.width), ld = scratch_of<Op>(rows.width);
  const int64_t words = depth / Op::kPair;
  bool finite = true;
  for (int64_t r = 0; r < rounded; r += kLanes<T>) {
    for (int64_t i = 0; i < kLanes<T>; ++i)
      finite &= fetch_row<Op>(rows, r + i, ld, factor, scratch + i * ld);
    auto* panel = reinterpret_cast<Word*>(to + floor_to(r, kPanel<T>) * depth) + r % kPanel<T>;
    for (int64_t w = 0; w < words; w += kLanes<T>) {
      IntVec<T> square[kLanes<T>];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes<T>; ++i)
        __builtin_memcpy(&square[i], scratch + i * ld + w * Op::kPair, sizeof square[i]);
      transpose<T>(square);
      const int64_t n = lesser<int64_t>(kLanes<T>, words - w);
      for (int64_t i = 0; i < n; ++i)
        __builtin_memcpy(panel + (w + i) * kPanel<T>, &square[i], sizeof square[i]);
    }
  }
  return finite;
}

// to[c][r] = from[r][c]: `rows` are whole vectors of elements, columns of `from` and rows of `to`
// are rounded up to the lanes.
template <class Op>
void transpose_operand(const typename Op::Element* from, int64_t ld, int64_t rows, int64_t columns,
                       typename Op::Element* to) {
  using T = typename Op::Real;
  for (int64_t r = 0; r < rows; r += kLanes<T> * Op::kPair)
    for (int64_t c = 0; c < columns; c += kLanes<T>) {
      if constexpr (Op::kPair == 1) {
        transpose_square<T>(from + r * ld + c, ld, to + c * rows + r, rows);
      } else {
        IntVec<T> square[kLanes<T>];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes<T>; ++i)
          square[i] = zip(from + (r + 2 * i) * ld + c, from + (r + 2 * i + 1) * ld + c);
        transpose<T>(square);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes<T>; ++i)
          __builtin_memcpy(to + (c + i) * rows + r, &square[i], kVectorBytes);
      }
    }
}

// Rows as rows: panels of kPanel columns, `panel_stride` elements apart, each [rounded][kPanel]
// (pairs of rows side by side).  `scratch` holds 2 rows of ceil_to(width, kPanel).
template <class Op>
bool pack_rows(const Rows& rows, int64_t rounded, typename Op::Real factor,
               typename Op::Element* to, int64_t panel_stride, typename Op::Element* scratch) {
  using T = typename Op::Real;
  using Element = typename Op::Element;
  constexpr int64_t kWide = kPanel<T>;
  const int64_t padded = ceil_to(rows.width, kWide);
  bool finite = true;
  for (int64_t r = 0; r < rounded; r += Op::kPair) {
    for (int i = 0; i < Op::kPair; ++i)
      finite &= fetch_row<Op>(rows, r + i, padded, factor, scratch + i * padded);
    Element* out = to + r * kWide;
    for (int64_t c = 0; c < padded; c += kWide, out += panel_stride) {
      if constexpr (Op::kPair == 1) {
        __builtin_memcpy(out, scratch + c, kWide * sizeof(Element));
      } else {
        for (int64_t x = 0; x < kWide; x += kLanes<T>) {
          const IntVec<T> words = zip(scratch + c + x, scratch + padded + c + x);
          __builtin_memcpy(out + 2 * x, &words, kVectorBytes);
        }
      }
    }
  }
  return finite;
}

// sum(a * b) over n columns of one row of each, in the accumulation type.
template <class T>
T dot_of_rows(const char* a, const Array& of_a, const char* b, const Array& of_b, int64_t columns) {
  constexpr int64_t kStep = kLanes<T>;
  Vec<T> sum{};
  for (int64_t d = 0; d < columns; d += kStep) {
    T x[kStep] = {}, y[kStep] = {};
    const int64_t n = lesser(kStep, columns - d);
    load_row(a + d * of_a.column * bytes_of(of_a.dtype), of_a.dtype, of_a.column, n, x);
    load_row(b + d * of_b.column * bytes_of(of_b.dtype), of_b.dtype, of_b.column, n, y);
    sum += load(x) * load(y);
  }
  return sum_lanes<T>(sum);
}

// delta = rowsum(dO * O) - dlse of query `row` of the tensors.
template <class T>
T delta_of(const AttentionParams& p, int64_t entry, int64_t h, int64_t row) {
  const T delta = dot_of_rows<T>(row_of(p.dout, entry, h, row), p.dout,
                                 row_of(p.out, entry, h, row), p.out, p.value_dim);
  return p.dlse ? delta - static_cast<const T*>(p.dlse)[(entry * p.q_heads + h) * p.q_rows + row]
                : delta;
}

// Accumulated values as an operand (rounded for pairs).
ATTNKIT_INLINE void store_element(float* to, Vec<float> v) { store(to, v); }
ATTNKIT_INLINE void store_element(double* to, Vec<double> v) { store(to, v); }
ATTNKIT_INLINE void store_element(uint16_t* to, Vec<float> v) { store_bf16(to, v); }

// Two rows of accumulated values as pairs.
ATTNKIT_INLINE void store_pair(uint16_t* to, Vec<float> first, Vec<float> second) {
  uint16_t rows[2][kLanes<float>];
  store_bf16(rows[0], first);
  store_bf16(rows[1], second);
  const IntVec<float> words = zip(rows[0], rows[1]);
  __builtin_memcpy(to, &words, kVectorBytes);
}
