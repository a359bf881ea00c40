// Register-tile products: C[M][N vectors] += A[M][depth] * B[depth][N vectors].
//
// M x N accumulators stay in registers; B is packed so that one step of depth is contiguous.
// kRows x kColumns is the largest tile that leaves registers for one step of B and a broadcast:
// 6 x 4 of 32 registers (AVX-512, Arm), 6 x 2 of 16 (AVX2, SSE2); 12 or more independent
// accumulators hide 2 FMA ports x 4-cycle latency.

constexpr int kRows = 6;
#if defined(ATTNKIT_ISA_AVX512) || defined(__aarch64__) || defined(ATTNKIT_ISA_WIDE)
constexpr int kColumns = 4;
#else
constexpr int kColumns = 2;
#endif

// Columns of a packed panel of B.
template <class T>
constexpr int kPanel = kColumns * kLanes<T>;

// Operands kept in the accumulation type.
template <class T>
struct Plain {
  using Real = T;
  using Element = T;
  static constexpr int kPair = 1;

  static ATTNKIT_INLINE Vec<T> broadcast(const T* a) { return splat(*a); }
  static ATTNKIT_INLINE Vec<T> operand(const T* b) { return load(b); }
  static ATTNKIT_INLINE Vec<T> step(Vec<T> c, Vec<T> a, Vec<T> b) { return c + a * b; }
};

// Operands kept in bfloat16, two consecutive values of the depth side by side, for instructions
// that multiply pairs and add them to a float32 accumulator.
struct Bf16Pairs {
  using Real = float;
  using Element = uint16_t;
  static constexpr int kPair = 2;

  static ATTNKIT_INLINE IntVec<float> broadcast(const uint16_t* a) {
    int32_t pair;
    __builtin_memcpy(&pair, a, 4);
    return IntVec<float>{} + pair;
  }
  static ATTNKIT_INLINE IntVec<float> operand(const uint16_t* b) {
    IntVec<float> v;
    __builtin_memcpy(&v, b, sizeof v);
    return v;
  }
  static ATTNKIT_INLINE Vec<float> step(Vec<float> c, IntVec<float> a, IntVec<float> b) {
#if defined(ATTNKIT_ISA_AVX512_BF16)
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
    using V = Vec<float>;
    const IntVec<float> high = IntVec<float>{} + static_cast<int32_t>(0xffff0000u);
    c += reinterpret_cast<V>(a & high) * reinterpret_cast<V>(b & high);
    return c + reinterpret_cast<V>(a << 16) * reinterpret_cast<V>(b << 16);
#endif
  }
};

template <int M, int N, class T>
ATTNKIT_INLINE void clear(Vec<T> (&c)[M][N]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) c[m][n] = Vec<T>{};
}

template <int M, int N, class T>
ATTNKIT_INLINE void load_tile(const T* from, int64_t ld, Vec<T> (&c)[M][N]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) c[m][n] = load(from + m * ld + n * kLanes<T>);
}

template <int M, int N, class T>
ATTNKIT_INLINE void store_tile(T* to, int64_t ld, const Vec<T> (&c)[M][N]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(to + m * ld + n * kLanes<T>, c[m][n]);
}

// A is row-major: element (m, k) at a[m * lda + k].
template <class Op, int M, int N>
ATTNKIT_INLINE void multiply_add(const typename Op::Element* __restrict a, int64_t lda,
                                 const typename Op::Element* __restrict b, int64_t depth,
                                 Vec<typename Op::Real> (&c)[M][N]) {
  using T = typename Op::Real;
#pragma GCC unroll 2
  for (int64_t k = 0; k < depth; k += Op::kPair) {
    decltype(Op::operand(b)) bv[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) bv[n] = Op::operand(b + n * kLanes<T> * Op::kPair);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const auto av = Op::broadcast(a + m * lda + k);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) c[m][n] = Op::step(c[m][n], av, bv[n]);
    }
    b += kPanel<T> * Op::kPair;
  }
}

// A is stored transposed: element (m, k) at a[k * lda + m], or, for pairs, at
// a[(k / 2 * lda + m) * 2 + k % 2].
template <class Op, int M, int N>
ATTNKIT_INLINE void multiply_add_transposed(const typename Op::Element* __restrict a, int64_t lda,
                                            const typename Op::Element* __restrict b, int64_t depth,
                                            Vec<typename Op::Real> (&c)[M][N]) {
  using T = typename Op::Real;
#pragma GCC unroll 2
  for (int64_t k = 0; k < depth; k += Op::kPair) {
    decltype(Op::operand(b)) bv[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) bv[n] = Op::operand(b + n * kLanes<T> * Op::kPair);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const auto av = Op::broadcast(a + m * Op::kPair);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) c[m][n] = Op::step(c[m][n], av, bv[n]);
    }
    a += lda * Op::kPair;
    b += kPanel<T> * Op::kPair;
  }
}

// to[M][columns] = A * B, columns a multiple of the lanes, B in panels `panel_stride` apart.
template <class Op, int M>
ATTNKIT_INLINE void product(const typename Op::Element* a, int64_t lda,
                            const typename Op::Element* b, int64_t panel_stride, int64_t depth,
                            typename Op::Real* to, int64_t ld, int64_t columns) {
  using T = typename Op::Real;
  int64_t done = 0;
  for (; done + kPanel<T> <= columns; done += kPanel<T>, b += panel_stride) {
    Vec<T> c[M][kColumns];
    clear<M, kColumns, T>(c);
    multiply_add<Op, M, kColumns>(a, lda, b, depth, c);
    store_tile<M, kColumns, T>(to + done, ld, c);
  }
  const auto rest = [&]<int N>() {
    Vec<T> c[M][N];
    clear<M, N, T>(c);
    multiply_add<Op, M, N>(a, lda, b, depth, c);
    store_tile<M, N, T>(to + done, ld, c);
  };
  switch ((columns - done) / kLanes<T>) {
    case 1:
      rest.template operator()<1>();
      break;
    case 2:
      if constexpr (kColumns > 2) rest.template operator()<2>();
      break;
    case 3:
      if constexpr (kColumns > 2) rest.template operator()<3>();
      break;
  }
}

// to[M][columns] += A * B.
template <class Op, int M, bool kTransposed = false>
ATTNKIT_INLINE void accumulate(const typename Op::Element* a, int64_t lda,
                               const typename Op::Element* b, int64_t panel_stride, int64_t depth,
                               typename Op::Real* to, int64_t ld, int64_t columns) {
  using T = typename Op::Real;
  const auto tile = [&]<int N>(int64_t at) {
    Vec<T> c[M][N];
    load_tile<M, N, T>(to + at, ld, c);
    if constexpr (kTransposed)
      multiply_add_transposed<Op, M, N>(a, lda, b, depth, c);
    else
      multiply_add<Op, M, N>(a, lda, b, depth, c);
    store_tile<M, N, T>(to + at, ld, c);
  };
  int64_t done = 0;
  for (; done + kPanel<T> <= columns; done += kPanel<T>, b += panel_stride)
    tile.template operator()<kColumns>(done);
  switch ((columns - done) / kLanes<T>) {
    case 1:
      tile.template operator()<1>(done);
      break;
    case 2:
      if constexpr (kColumns > 2) tile.template operator()<2>(done);
      break;
    case 3:
      if constexpr (kColumns > 2) tile.template operator()<3>(done);
      break;
  }
}
