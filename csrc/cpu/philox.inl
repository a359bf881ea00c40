// Philox-4x32-10 (Salmon et al., SC 2011): the dropout mask, the same on every backend.
//
// Key: the 64-bit seed.  Counter: (key / 4, query, head, batch), lane key % 4.  A weight is kept
// when (x >> 8) * 2^-24 >= p.

constexpr int kWideLanes = kVectorBytes / 8;
typedef uint64_t Wide __attribute__((vector_size(kVectorBytes)));  // 32-bit values, one per 64 bits

ATTNKIT_INLINE Wide multiply32(Wide a, uint32_t constant) {
  const Wide b = Wide{} + constant;
#if defined(ATTNKIT_ISA_AVX512)
  return reinterpret_cast<Wide>(
      _mm512_mul_epu32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(ATTNKIT_ISA_AVX2)
  return reinterpret_cast<Wide>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return a * b;
#endif
}

ATTNKIT_INLINE void philox(Wide (&c)[4], uint64_t seed) {
  const Wide low = Wide{} + 0xffffffffu;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const Wide a = multiply32(c[0], 0xD2511F53u), b = multiply32(c[2], 0xCD9E8D57u);
    c[0] = (b >> 32) ^ c[1] ^ k0;
    c[2] = (a >> 32) ^ c[3] ^ k1;
    c[1] = b & low;
    c[3] = a & low;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// The dropout of one (sequence, head): factors 0 or 1 / (1 - p).
template <class T>
struct Dropout {
  uint64_t seed = 0;
  uint64_t threshold = 0;
  T factor = 1;
  uint32_t head = 0, batch = 0;
  bool active = false;

  Dropout(const AttentionParams& p, int64_t head_index, int64_t sequence)
      : seed(p.seed),
        threshold(static_cast<uint64_t>(__builtin_ceil(p.dropout * 16777216.0)) << 8),
        factor(p.dropout < 1 ? static_cast<T>(1 / (1 - p.dropout)) : T{0}),
        head(static_cast<uint32_t>(head_index)),
        batch(static_cast<uint32_t>(sequence)),
        active(p.dropout > 0) {}

  // Query `i`, keys [j, j + n), j a multiple of 4; writes up to the next multiple of 4 kWideLanes.
  void row(int64_t i, int64_t j, int64_t n, T* to) const {
    T lanes[4][kWideLanes];
    for (int64_t at = 0; at < n; at += 4 * kWideLanes) {
      Wide c[4] = {count(j + at, 4), Wide{} + static_cast<uint32_t>(i), Wide{} + head,
                   Wide{} + batch};
      philox(c, seed);
      for (int r = 0; r < 4; ++r) pick(c[r], lanes[r]);
      if constexpr (sizeof(T) == 4) {
        const Vec<T> low = load(lanes[0]), high = load(lanes[2]);  // two rows each
        constexpr auto kAll = std::make_integer_sequence<int, kLanes<T>>{};
        store(to + at, fours<0>(low, high, kAll));
        store(to + at + kLanes<T>, fours<kLanes<T> / 4>(low, high, kAll));
      } else {
        for (int l = 0; l < kWideLanes; ++l)
          for (int r = 0; r < 4; ++r) to[at + 4 * l + r] = lanes[r][l];
      }
    }
  }

  // Keys j .. j + 3 (j a multiple of 4), queries [i, i + n): four rows `ld` apart; n whole vectors.
  void columns(int64_t j, int64_t i, int64_t n, T* to, int64_t ld) const {
    for (int64_t at = 0; at < n; at += kWideLanes) {
      Wide c[4] = {Wide{} + static_cast<uint32_t>(j / 4), count(i + at, 1), Wide{} + head,
                   Wide{} + batch};
      philox(c, seed);
      for (int r = 0; r < 4; ++r) pick(c[r], to + r * ld + at);
    }
  }

 private:
  // {first, first + 1, ...} of the indices divided by `step`; 32 bits each.
  static ATTNKIT_INLINE Wide count(int64_t first, int64_t step) {
    Wide v;
    for (int l = 0; l < kWideLanes; ++l) v[l] = l;
    return (v + static_cast<uint64_t>(first / step)) & 0xffffffffu;
  }

  // Lane l of each of four half vectors, for l = kFirst, kFirst + 1, ...
  template <int kFirst, int... kIndex>
  static ATTNKIT_INLINE Vec<T> fours(Vec<T> low, Vec<T> high,
                                     std::integer_sequence<int, kIndex...>) {
    return __builtin_shufflevector(
        low, high, (kFirst + kIndex / 4 + kIndex % 2 * kWideLanes + kIndex % 4 / 2 * kLanes<T>)...);
  }

  // Factors of kWideLanes random numbers of 32 bits: x >> 8 is at least p 2^24 where x is at least
  // 2^8 times as much.
  ATTNKIT_INLINE void pick(Wide x, T* to) const {
    typedef T Narrow __attribute__((vector_size(kWideLanes * sizeof(T))));
    typedef typename Simd<T>::Int Ints __attribute__((vector_size(kWideLanes * sizeof(T))));
    const Ints kept = __builtin_convertvector(x >= threshold, Ints);
    const Narrow chosen = kept ? Narrow{} + factor : Narrow{};
    __builtin_memcpy(to, &chosen, sizeof chosen);
  }
};
