// Register-tile products: C[M][N vectors] += A[M][depth] * B[depth][N vectors].
//
// M x N accumulators stay in registers; B is packed so that one step of depth is contiguous.
// kRegisterRows x kColumns is the largest tile that leaves registers for one step of B and a
// broadcast: 6 x 4 of 32 registers (AVX-512, Arm), 6 x 2 of 16 (AVX2, SSE2); 12 or more independent
// accumulators hide 2 FMA ports x 4-cycle latency.
//
// An operand type says what the elements of A and B are, in kPair of the depth side by side; a
// product takes kRows rows of A and a depth that is a multiple of kDepth.

constexpr int kRegisterRows = 6;
#if defined(ATTNKIT_ISA_AVX512) || defined(__aarch64__) || defined(ATTNKIT_ISA_WIDE)
constexpr int kColumns = 4;
#else
constexpr int kColumns = 2;
#endif

// Columns of a packed panel of B.
template <class T>
constexpr int kPanel = kColumns * kLanes<T>;

// What operand types without a unit of their own have in its place.
struct NoUnit {};

// Operands kept in the accumulation type.
template <class T>
struct Plain {
  using Real = T;
  using Element = T;
  using Unit = NoUnit;
  static constexpr bool kTiled = false;
  static constexpr int kPair = 1, kDepth = 1, kRows = kRegisterRows, kExpDegree = 5;

  static ATTNKIT_INLINE Vec<T> broadcast(const T* a) { return splat(*a); }
  static ATTNKIT_INLINE Vec<T> operand(const T* b) { return load(b); }
  static ATTNKIT_INLINE Vec<T> step(Vec<T> c, Vec<T> a, Vec<T> b) { return c + a * b; }
};

// Operands kept in bfloat16, two consecutive values of the depth side by side, for instructions
// that multiply pairs and add them to a float32 accumulator.
struct Bf16Pairs {
  using Real = float;
  using Element = uint16_t;
  using Unit = NoUnit;
  static constexpr bool kTiled = false;
  static constexpr int kPair = 2, kDepth = 2, kRows = kRegisterRows;
  static constexpr int kExpDegree = 4;  // weights are rounded to bfloat16

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

// The columns of a product, a register tile at a time: body.operator()<vectors>(first column, B).
template <class Op, class Body>
ATTNKIT_INLINE void for_column_tiles(const typename Op::Element* b, int64_t panel_stride,
                                     int64_t columns, const Body& body) {
  using T = typename Op::Real;
  int64_t at = 0;
  for (; at + kPanel<T> <= columns; at += kPanel<T>, b += panel_stride)
    body.template operator()<kColumns>(at, b);
  switch ((columns - at) / kLanes<T>) {
    case 1:
      body.template operator()<1>(at, b);
      break;
    case 2:
      if constexpr (kColumns > 2) body.template operator()<2>(at, b);
      break;
    case 3:
      if constexpr (kColumns > 2) body.template operator()<3>(at, b);
      break;
  }
}

// A * B, columns a multiple of the lanes, B in panels `panel_stride` apart, handed out while it is
// in registers: body.operator()<vectors>(first column, c[kRows][vectors]).
template <class Op, class Body>
  requires(!Op::kTiled)
ATTNKIT_INLINE void multiply(const typename Op::Element* a, int64_t lda,
                             const typename Op::Element* b, int64_t panel_stride, int64_t depth,
                             int64_t columns, const Body& body) {
  using T = typename Op::Real;
  for_column_tiles<Op>(b, panel_stride, columns,
                       [&]<int N>(int64_t at, const typename Op::Element* panel) {
                         Vec<T> c[Op::kRows][N];
                         clear<Op::kRows, N, T>(c);
                         multiply_add<Op, Op::kRows, N>(a, lda, panel, depth, c);
                         body.template operator()<N>(at, c);
                       });
}

// to[kRows][columns] = A * B.
template <class Op>
  requires(!Op::kTiled)
ATTNKIT_INLINE void product(const typename Op::Element* a, int64_t lda,
                            const typename Op::Element* b, int64_t panel_stride, int64_t depth,
                            typename Op::Real* to, int64_t ld, int64_t columns) {
  using T = typename Op::Real;
  multiply<Op>(a, lda, b, panel_stride, depth, columns,
               [&]<int N>(int64_t at, const Vec<T>(&c)[Op::kRows][N]) {
                 store_tile<Op::kRows, N, T>(to + at, ld, c);
               });
}

// to[kRows][columns] += A * B.
template <class Op>
  requires(!Op::kTiled)
ATTNKIT_INLINE void accumulate(const typename Op::Element* a, int64_t lda,
                               const typename Op::Element* b, int64_t panel_stride, int64_t depth,
                               typename Op::Real* to, int64_t ld, int64_t columns) {
  using T = typename Op::Real;
  for_column_tiles<Op>(b, panel_stride, columns,
                       [&]<int N>(int64_t at, const typename Op::Element* panel) {
                         Vec<T> c[Op::kRows][N];
                         load_tile<Op::kRows, N, T>(to + at, ld, c);
                         multiply_add<Op, Op::kRows, N>(a, lda, panel, depth, c);
                         store_tile<Op::kRows, N, T>(to + at, ld, c);
                       });
}
