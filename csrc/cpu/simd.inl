// Vectors of kVectorBytes bytes and the few operations on them that attention needs.
//
// Everything is written with the compiler's vector extensions, so one source serves every
// instruction set; only conversions that the extensions cannot express have a branch each.
// Included once per instruction set, inside its namespace, after all standard headers.

#define ATTNKIT_INLINE __attribute__((always_inline)) inline

constexpr int kVectorBytes = ATTNKIT_VECTOR_BYTES;

template <class T>
struct Simd;

template <>
struct Simd<float> {
  static constexpr int kLanes = kVectorBytes / 4;
  using Int = int32_t;
  typedef float Vec __attribute__((vector_size(kVectorBytes)));
  typedef int32_t IntVec __attribute__((vector_size(kVectorBytes)));
  typedef uint16_t HalfVec __attribute__((vector_size(kVectorBytes / 2)));
};

template <>
struct Simd<double> {
  static constexpr int kLanes = kVectorBytes / 8;
  using Int = int64_t;
  typedef double Vec __attribute__((vector_size(kVectorBytes)));
  typedef int64_t IntVec __attribute__((vector_size(kVectorBytes)));
};

template <class T>
using Vec = typename Simd<T>::Vec;
template <class T>
using IntVec = typename Simd<T>::IntVec;
template <class T>
constexpr int kLanes = Simd<T>::kLanes;

// Own helpers instead of std:: ones: a std:: template compiled here for a wide instruction set
// could be the copy that the linker keeps for the whole library.
template <class T>
ATTNKIT_INLINE constexpr T lesser(T a, T b) {
  return b < a ? b : a;
}
template <class T>
ATTNKIT_INLINE T greater(T a, T b) {
  return a < b ? b : a;
}
ATTNKIT_INLINE int64_t ceil_to(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}
ATTNKIT_INLINE int64_t floor_to(int64_t n, int64_t multiple) { return n / multiple * multiple; }

template <class T>
constexpr T kInfinity = static_cast<T>(__builtin_inf());

template <class T>
ATTNKIT_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};  // x - 0 is x, also for -0: no arithmetic is left of it
}

template <class T>
ATTNKIT_INLINE Vec<T> load(const T* p) {
  Vec<T> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class T>
ATTNKIT_INLINE void store(T* p, Vec<T> v) {
  __builtin_memcpy(p, &v, sizeof v);
}

template <class T>
ATTNKIT_INLINE IntVec<T> load_int(const typename Simd<T>::Int* p) {
  IntVec<T> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class T>
ATTNKIT_INLINE Vec<T> select(IntVec<T> mask, Vec<T> yes, Vec<T> no) {
  return mask ? yes : no;
}

// {start, start + 1, ...}
template <class T>
ATTNKIT_INLINE IntVec<T> iota(int64_t start) {
  IntVec<T> v;
  for (int i = 0; i < kLanes<T>; ++i) v[i] = static_cast<typename Simd<T>::Int>(start + i);
  return v;
}

// NaN in `a` is dropped, as the reduction below wants it: exp(NaN - m) brings it back.
template <class T>
ATTNKIT_INLINE Vec<T> vmax(Vec<T> a, Vec<T> b) {
#if defined(ATTNKIT_ISA_AVX512)
  if constexpr (sizeof(T) == 4) return _mm512_maskz_max_ps(0xffff, a, b);
#endif
  return a > b ? a : b;
}

template <class T, int kBy, int... kIndex>
ATTNKIT_INLINE Vec<T> rotate(Vec<T> v, std::integer_sequence<int, kIndex...>) {
  return __builtin_shufflevector(v, v, (kIndex + kBy) % kLanes<T>...);
}

// Halves onto each other until one lane is left.
template <class T, int kBy = kLanes<T> / 2, class F>
ATTNKIT_INLINE T fold(Vec<T> v, const F& join) {
  v = join(v, rotate<T, kBy>(v, std::make_integer_sequence<int, kLanes<T>>{}));
  if constexpr (kBy > 1)
    return fold<T, kBy / 2>(v, join);
  else
    return v[0];
}
template <class T>
ATTNKIT_INLINE T sum_lanes(Vec<T> v) {
  return fold<T>(v, [](Vec<T> a, Vec<T> b) { return a + b; });
}
template <class T>
ATTNKIT_INLINE T max_lanes(Vec<T> v) {
  return fold<T>(v, [](Vec<T> a, Vec<T> b) { return vmax<T>(a, b); });
}

// Whether some lane of v is above x.
template <class T>
ATTNKIT_INLINE bool exceeds(Vec<T> v, T x) {
#if defined(ATTNKIT_ISA_AVX512)
  if constexpr (sizeof(T) == 4) return _mm512_cmp_ps_mask(v, splat(x), _CMP_GT_OQ) != 0;
#endif
  return max_lanes<T>(v) > x;
}

// 2^(x * unit) for x * unit <= 128: a polynomial on [-1/2, 1/2], 1 at 0, times 2^round(x * unit);
// and exactly 0 below -125, so that a masked score of -inf has weight 0.  NaN stays NaN. The
// relative error is 1e-7 with degree 5, 3e-6 with degree 4.
template <int kDegree = 5>
ATTNKIT_INLINE Vec<float> exp2(Vec<float> x, float unit = 1.f) {
  using V = Vec<float>;
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  const V shifted = x * unit + kRound, n = shifted - kRound;
  const V f = x * unit - n;
  V p;
  if constexpr (kDegree == 5) {
    p = splat(1.326472725e-03f);
    p = p * f + 9.671512786e-03f;
    p = p * f + 5.550733744e-02f;
    p = p * f + 2.402224208e-01f;
    p = p * f + 6.931469776e-01f;
  } else {
    static_assert(kDegree == 4);
    p = splat(9.582853235e-03f);
    p = p * f + 5.590642594e-02f;
    p = p * f + 2.402409862e-01f;
    p = p * f + 6.931241933e-01f;
  }
  p = p * f + 1.0f;
#if defined(ATTNKIT_ISA_AVX512)
  // "not less" is true for NaN
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, splat(-100.f), _CMP_NLT_UQ), p, n);
#else
  using I = IntVec<float>;
  const V r = p * reinterpret_cast<V>((reinterpret_cast<I>(shifted) - (0x4B400000 - 127)) << 23);
  const I tiny = n < -100.f;  // false for NaN
  return reinterpret_cast<V>(reinterpret_cast<I>(r) & ~tiny);
#endif
}

template <int = 5>
ATTNKIT_INLINE Vec<double> exp2(Vec<double> x, double unit = 1) {
  Vec<double> r;
  for (int i = 0; i < kLanes<double>; ++i) r[i] = __builtin_exp2(x[i] * unit);
  return r;
}

ATTNKIT_INLINE float log_of(float x) { return __builtin_logf(x); }
ATTNKIT_INLINE double log_of(double x) { return __builtin_log(x); }

template <class T>
constexpr T kLog2e = static_cast<T>(1.4426950408889634074);

// 1 / x, for x of at least 1.
ATTNKIT_INLINE Vec<float> reciprocal(Vec<float> x) {
#if defined(ATTNKIT_ISA_AVX512)
  const Vec<float> r = _mm512_rcp14_ps(x);  // 14 bits, and a step of Newton's for the others
  return r * (2.f - x * r);
#else
  return 1.f / x;
#endif
}

// tanh: an odd polynomial near 0 (Cephes' coefficients), 1 - 2 / (e^2x + 1) beyond.
ATTNKIT_INLINE Vec<float> tanh(Vec<float> x) {
  using V = Vec<float>;
  const V a = x < 0.f ? -x : x;
  const V z = x * x;
  V p = splat(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const V near = x + x * z * p;
  const V capped = a > 20.f ? splat(20.f) : a;  // NaN stays NaN
  const V far = 1.f - 2.f * reciprocal(exp2(capped, 2.f * kLog2e<float>) + 1.f);
  return a < 0.625f ? near : (x < 0.f ? -far : far);
}

ATTNKIT_INLINE Vec<double> tanh(Vec<double> x) {
  Vec<double> r;
  for (int i = 0; i < kLanes<double>; ++i) r[i] = __builtin_tanh(x[i]);
  return r;
}

// ---------------------------------------------------------------- 16-bit floats

ATTNKIT_INLINE float from_bf16(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

ATTNKIT_INLINE uint16_t to_bf16(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

ATTNKIT_INLINE float from_fp16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t magnitude = h & 0x7fff;
  uint32_t bits = magnitude << 13;
  float f;
  if (magnitude >= 0x7c00) {
    bits += 0x70000000u;  // infinity or NaN
  } else {
    bits += 0x38000000u;
    if (magnitude < 0x0400) {  // subnormal: let the FPU normalise it
      bits += 0x00800000u;
      __builtin_memcpy(&f, &bits, 4);
      f -= 6.103515625e-05f;
      __builtin_memcpy(&bits, &f, 4);
    }
  }
  bits |= sign;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

ATTNKIT_INLINE uint16_t to_fp16(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  const uint32_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00);
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00);  // rounds to infinity
  if (bits < 0x38800000u) {  // subnormal: adding 0.5 puts the result in the low mantissa bits
    float a;
    __builtin_memcpy(&a, &bits, 4);
    a += 0.5f;
    __builtin_memcpy(&bits, &a, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  bits += 0xc8000fffu + ((bits >> 13) & 1);  // rebias and round to nearest even
  return static_cast<uint16_t>(sign | (bits >> 13));
}

// 16-bit values in the lower halves of words.  GCC puts vectors of 64 bytes together from halves.
ATTNKIT_INLINE IntVec<float> widen(const uint16_t* p) {
#if defined(ATTNKIT_ISA_AVX512)
  __m256i h;
  __builtin_memcpy(&h, p, sizeof h);
  return reinterpret_cast<IntVec<float>>(_mm512_cvtepu16_epi32(h));
#else
  Simd<float>::HalfVec h;
  __builtin_memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, IntVec<float>);
#endif
}

ATTNKIT_INLINE Vec<float> load_bf16(const uint16_t* p) {
  return reinterpret_cast<Vec<float>>(widen(p) << 16);
}

ATTNKIT_INLINE void store_bf16(uint16_t* p, Vec<float> v) {
#if defined(ATTNKIT_ISA_AVX512_BF16)
  const __m256bh h = _mm512_cvtneps_pbh(v);
  __builtin_memcpy(p, &h, sizeof h);
#else
  typedef uint32_t U __attribute__((vector_size(kVectorBytes)));
  const U bits = reinterpret_cast<U>(v);
  const U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const U quiet = (bits >> 16) | 0x40;
  const U r = v == v ? rounded : quiet;
  const Simd<float>::HalfVec h = __builtin_convertvector(r, Simd<float>::HalfVec);
  __builtin_memcpy(p, &h, sizeof h);
#endif
}

// {first[0], second[0], first[1], ...}, two 16-bit values to a word.
ATTNKIT_INLINE IntVec<float> zip(const uint16_t* first, const uint16_t* second) {
  return widen(first) | (widen(second) << 16);
}

ATTNKIT_INLINE Vec<float> load_fp16(const uint16_t* p) {
#if defined(ATTNKIT_ISA_AVX512)
  __m256i h;
  __builtin_memcpy(&h, p, sizeof h);
  return _mm512_cvtph_ps(h);
#elif defined(ATTNKIT_ISA_AVX2)
  __m128i h;
  __builtin_memcpy(&h, p, sizeof h);
  return _mm256_cvtph_ps(h);
#else
  float lane[kLanes<float>];
  for (int i = 0; i < kLanes<float>; ++i) lane[i] = from_fp16(p[i]);
  return load(lane);
#endif
}

ATTNKIT_INLINE void store_fp16(uint16_t* p, Vec<float> v) {
#if defined(ATTNKIT_ISA_AVX512)
  const __m256i h = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
  __builtin_memcpy(p, &h, sizeof h);
#elif defined(ATTNKIT_ISA_AVX2)
  const __m128i h = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
  __builtin_memcpy(p, &h, sizeof h);
#else
  for (int i = 0; i < kLanes<float>; ++i) p[i] = to_fp16(v[i]);
#endif
}
