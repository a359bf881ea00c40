// Products on tile registers of 16 rows x 64 bytes (AMX): 32 x 32 of C at a time, as 2 x 2 tiles.
//
// B is packed as for pairs, so that 16 pairs of the depth x 16 columns of a panel are one tile.
// Where the instructions are missing, the same products are done in plain code, for the tests.

struct Bf16Tiles {
  using Real = float;
  using Element = uint16_t;
  static constexpr bool kTiled = true;
  static constexpr int kPair = 2, kDepth = 32, kRows = 32;
  static constexpr int kExpDegree = 4;  // weights are rounded to bfloat16

  // The tile registers, configured for as long as this lives.  A thread that kept them longer would
  // have 8 KiB more to save whenever it is interrupted.
  class Unit {
   public:
    Unit();
    ~Unit();
    Unit(const Unit&) = delete;
    Unit& operator=(const Unit&) = delete;
  };
};

#if defined(ATTNKIT_ISA_AMX)

inline Bf16Tiles::Unit::Unit() {
  struct {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } shape;
  _tile_loadconfig(&shape);
}
inline Bf16Tiles::Unit::~Unit() { _tile_release(); }

// The intrinsics do not say that they read memory.
ATTNKIT_INLINE void memory_fence() { asm volatile("" ::: "memory"); }

#define ATTNKIT_TILE_ZERO(c) _tile_zero(c)
#define ATTNKIT_TILE_LOAD(t, from, ld) _tile_loadd(t, from, (ld) * sizeof(*(from)))
#define ATTNKIT_TILE_STORE(to, ld, t) _tile_stored(t, to, (ld) * sizeof(*(to)))
#define ATTNKIT_TILE_MULTIPLY(c, a, b) _tile_dpbf16ps(c, a, b)

#else

inline Bf16Tiles::Unit::Unit() {}
inline Bf16Tiles::Unit::~Unit() {}
ATTNKIT_INLINE void memory_fence() {}

inline thread_local char emulated_tiles[8][16][64];

template <class E>
inline void emulated_load(char (&tile)[16][64], const E* from, int64_t ld) {
  for (int r = 0; r < 16; ++r) __builtin_memcpy(tile[r], from + r * ld, 64);
}
inline void emulated_store(float* to, int64_t ld, const char (&tile)[16][64]) {
  for (int r = 0; r < 16; ++r) __builtin_memcpy(to + r * ld, tile[r], 64);
}
inline void emulated_multiply(char (&c)[16][64], const char (&a)[16][64], const char (&b)[16][64]) {
  for (int r = 0; r < 16; ++r) {
    float sum[16];
    uint16_t left[32], right[32];
    __builtin_memcpy(sum, c[r], 64);
    __builtin_memcpy(left, a[r], 64);
    for (int pair = 0; pair < 16; ++pair) {
      __builtin_memcpy(right, b[pair], 64);
      for (int n = 0; n < 16; ++n)
        for (int i = 0; i < 2; ++i)
          sum[n] += from_bf16(left[2 * pair + i]) * from_bf16(right[2 * n + i]);
    }
    __builtin_memcpy(c[r], sum, 64);
  }
}

#define ATTNKIT_TILE_ZERO(c) __builtin_memset(emulated_tiles[c], 0, sizeof emulated_tiles[c])
#define ATTNKIT_TILE_LOAD(t, from, ld) emulated_load(emulated_tiles[t], from, ld)
#define ATTNKIT_TILE_STORE(to, ld, t) emulated_store(to, ld, emulated_tiles[t])
#define ATTNKIT_TILE_MULTIPLY(c, a, b) \
  emulated_multiply(emulated_tiles[c], emulated_tiles[a], emulated_tiles[b])

#endif

// C[32][16 or 32] (+)= A B.  C is in tiles 0 to 3, A in 4 and 5, B in 6 and 7.
template <bool kAdd, bool kTwo>
ATTNKIT_INLINE void tile_square(const uint16_t* a, int64_t lda, const uint16_t* b, int64_t depth,
                                float* to, int64_t ld) {
  constexpr int64_t kBStep = 2 * kPanel<float>;  // elements of a pair of rows of B
  if constexpr (kAdd) {
    ATTNKIT_TILE_LOAD(0, to, ld);
    ATTNKIT_TILE_LOAD(2, to + 16 * ld, ld);
    if constexpr (kTwo) {
      ATTNKIT_TILE_LOAD(1, to + 16, ld);
      ATTNKIT_TILE_LOAD(3, to + 16 * ld + 16, ld);
    }
  } else {
    ATTNKIT_TILE_ZERO(0);
    ATTNKIT_TILE_ZERO(2);
    if constexpr (kTwo) {
      ATTNKIT_TILE_ZERO(1);
      ATTNKIT_TILE_ZERO(3);
    }
  }
  for (int64_t k = 0; k < depth; k += 32, b += 16 * kBStep) {
    ATTNKIT_TILE_LOAD(4, a + k, lda);
    ATTNKIT_TILE_LOAD(6, b, kBStep);
    ATTNKIT_TILE_MULTIPLY(0, 4, 6);
    ATTNKIT_TILE_LOAD(5, a + k + 16 * lda, lda);
    ATTNKIT_TILE_MULTIPLY(2, 5, 6);
    if constexpr (kTwo) {
      ATTNKIT_TILE_LOAD(7, b + 32, kBStep);
      ATTNKIT_TILE_MULTIPLY(1, 4, 7);
      ATTNKIT_TILE_MULTIPLY(3, 5, 7);
    }
  }
  ATTNKIT_TILE_STORE(to, ld, 0);
  ATTNKIT_TILE_STORE(to + 16 * ld, ld, 2);
  if constexpr (kTwo) {
    ATTNKIT_TILE_STORE(to + 16, ld, 1);
    ATTNKIT_TILE_STORE(to + 16 * ld + 16, ld, 3);
  }
}

template <bool kAdd>
ATTNKIT_INLINE void tile_columns(const uint16_t* a, int64_t lda, const uint16_t* b,
                                 int64_t panel_stride, int64_t depth, float* to, int64_t ld,
                                 int64_t columns) {
  memory_fence();
  for (int64_t at = 0; at < columns; at += 32) {
    const uint16_t* panel = b + at / kPanel<float> * panel_stride + at % kPanel<float> * 2;
    if (at + 32 <= columns)
      tile_square<kAdd, true>(a, lda, panel, depth, to + at, ld);
    else
      tile_square<kAdd, false>(a, lda, panel, depth, to + at, ld);
  }
  memory_fence();
}

template <class Op>
  requires(Op::kTiled)
ATTNKIT_INLINE void product(const uint16_t* a, int64_t lda, const uint16_t* b, int64_t panel_stride,
                            int64_t depth, float* to, int64_t ld, int64_t columns) {
  tile_columns<false>(a, lda, b, panel_stride, depth, to, ld, columns);
}

template <class Op>
  requires(Op::kTiled)
ATTNKIT_INLINE void accumulate(const uint16_t* a, int64_t lda, const uint16_t* b,
                               int64_t panel_stride, int64_t depth, float* to, int64_t ld,
                               int64_t columns) {
  tile_columns<true>(a, lda, b, panel_stride, depth, to, ld, columns);
}

#undef ATTNKIT_TILE_ZERO
#undef ATTNKIT_TILE_LOAD
#undef ATTNKIT_TILE_STORE
#undef ATTNKIT_TILE_MULTIPLY
