// The 8-bit values of quantised caches: int8, and float8_e4m3fn (sign, 4 bits of exponent with bias
// 7, 3 of mantissa; no infinity; NaN has all bits set but the sign).

typedef int8_t Int8Vec __attribute__((vector_size(kVectorBytes / 4)));

constexpr float kLargestInt8 = 127, kLargestFp8 = 448;

ATTNKIT_INLINE Vec<float> load_int8(const int8_t* p) {
  // compilers take the general way one value at a time
#if defined(ATTNKIT_ISA_AVX512)
  __m128i v;
  __builtin_memcpy(&v, p, sizeof v);
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(v));
#elif defined(ATTNKIT_ISA_AVX2)
  int64_t v;
  __builtin_memcpy(&v, p, sizeof v);
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(v)));
#else
  Int8Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return __builtin_convertvector(__builtin_convertvector(v, IntVec<float>), Vec<float>);
#endif
}

// In the place of a float16 the bits mean 2^-8 of the value, also where they are subnormal.
constexpr float kFp8Unit = 256;

ATTNKIT_INLINE float from_fp8(uint8_t x) {
  const uint16_t magnitude = x & 0x7f, nan = magnitude == 0x7f ? 0x7c00 : 0;
  return from_fp16(static_cast<uint16_t>((x & 0x80) << 8 | magnitude << 7 | nan)) * kFp8Unit;
}

// 8-bit values as 16-bit ones, their highest bit in all that are added.
ATTNKIT_INLINE Simd<float>::HalfVec sign_extended(const uint8_t* p) {
  using Half = Simd<float>::HalfVec;
#if defined(ATTNKIT_ISA_AVX512)
  __m128i v;
  __builtin_memcpy(&v, p, sizeof v);
  return reinterpret_cast<Half>(_mm256_cvtepi8_epi16(v));
#elif defined(ATTNKIT_ISA_AVX2)
  int64_t v;
  __builtin_memcpy(&v, p, sizeof v);
  return reinterpret_cast<Half>(_mm_cvtepi8_epi16(_mm_cvtsi64_si128(v)));
#else
  typedef int16_t Signed __attribute__((vector_size(kVectorBytes / 2)));
  Int8Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return reinterpret_cast<Half>(__builtin_convertvector(v, Signed));
#endif
}

ATTNKIT_INLINE Vec<float> load_fp8(const uint8_t* p) {
  using Half = Simd<float>::HalfVec;
  // the sign has gone to bits 14 and 15; one more than NaN's magnitude, and no other, has bit 14
  const Half x = sign_extended(p) << 7 & 0xbfff;
  const Half half = x | ((x + 0x80) & 0x4000);
  uint16_t lane[kLanes<float>];
  __builtin_memcpy(lane, &half, sizeof half);
  return load_fp16(lane) * kFp8Unit;
}

// To the nearest, ties to even; what is too large becomes the largest.
ATTNKIT_INLINE int8_t to_int8(float x) {
  const float whole = __builtin_rintf(x);
  return static_cast<int8_t>(lesser(greater(whole, -kLargestInt8), kLargestInt8));
}

ATTNKIT_INLINE uint8_t to_fp8(float x) {
  const float size = lesser(__builtin_fabsf(x), kLargestFp8);
  uint32_t bits, sign;
  __builtin_memcpy(&sign, &x, 4);
  sign = sign >> 24 & 0x80;
  if (size != size) return static_cast<uint8_t>(sign | 0x7f);
  if (size < 0x1p-6f) {  // subnormal: a multiple of 2^-9, the last digit of this sum
    const float sum = size + 0x1p14f;
    __builtin_memcpy(&bits, &sum, 4);
    return static_cast<uint8_t>(sign | (bits & 0xff));
  }
  __builtin_memcpy(&bits, &size, 4);
  bits += 0x7ffff + ((bits >> 20) & 1);
  return static_cast<uint8_t>(sign | ((bits >> 20) - (120 << 3)));
}
