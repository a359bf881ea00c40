// All CPU kernels for one instruction set.  The including file sets, before it:
//   ATTNKIT_ISA_NAME      the name that `attnkit info` shows
//   ATTNKIT_VECTOR_BYTES  16, 32 or 64
//   ATTNKIT_ISA_AVX2 / _AVX512 / _AVX512_BF16 / _AMX / _WIDE  which branches of the shims apply
//   ATTNKIT_TILES         multiply bfloat16 on tile registers (or, without _AMX, as if there were)
//   ATTNKIT_FLOAT64       also build the float64 kernels (one set of them serves every machine)
// and opens a namespace of its own.

#include "simd.inl"
#include "gemm.inl"
#if defined(ATTNKIT_TILES)
#include "tiles.inl"
#endif
#include "parallel.inl"
#include "pack.inl"
#include "philox.inl"
#include "scores.inl"
#include "forward.inl"
#include "row_sums.inl"
#include "backward.inl"
#include "bias_gradient.inl"
#include "quantised.inl"
#include "decode.inl"
#include "append.inl"
#include "probe.inl"

#if defined(ATTNKIT_TILES)
using Bf16Operand = Bf16Tiles;
#elif defined(ATTNKIT_ISA_AVX512_BF16) || defined(ATTNKIT_ISA_WIDE)
using Bf16Operand = Bf16Pairs;
#else
using Bf16Operand = Plain<float>;
#endif

// float16, and bfloat16 without instructions for it, become float32 while they are packed.
template <template <class> class Pass>
void run(const AttentionParams& p, const Team& team) {
#if defined(ATTNKIT_FLOAT64)
  if (p.q.dtype == DType::kFloat64) return Pass<Plain<double>>(p, team).run();
#endif
  if constexpr (!std::is_same_v<Bf16Operand, Plain<float>>)
    if (p.q.dtype == DType::kBFloat16) return Pass<Bf16Operand>(p, team).run();
  Pass<Plain<float>>(p, team).run();
}

inline void row_sums(const AttentionParams& p, const Team& team) {
#if defined(ATTNKIT_FLOAT64)
  if (p.q.dtype == DType::kFloat64) return RowSums<double>(p, team).run();
#endif
  RowSums<float>(p, team).run();
}

inline void bias_gradient(const AttentionParams& p, const Team& team) {
#if defined(ATTNKIT_FLOAT64)
  if (p.q.dtype == DType::kFloat64) return BiasGradient<double>(p, team).run();
#endif
  BiasGradient<float>(p, team).run();
}

inline void decode(const AttentionParams& p, const Team& team) {
#if defined(ATTNKIT_FLOAT64)
  if (p.k.dtype == DType::kFloat64) return Decode<FromFloat64>(p, team).run();
#endif
  if (p.k.dtype == DType::kBFloat16) return Decode<FromBf16>(p, team).run();
  if (p.k.dtype == DType::kFloat16) return Decode<FromFp16>(p, team).run();
  if (p.k.dtype == DType::kInt8) return Decode<FromInt8>(p, team).run();
  if (p.k.dtype == DType::kFloat8) return Decode<FromFp8>(p, team).run();
  Decode<FromFloat32>(p, team).run();
}

inline void append(const AppendParams& p, const Team& team) {
#if defined(ATTNKIT_FLOAT64)
  if (p.k.dtype == DType::kFloat64) return Append<double>(p, team).run();
#endif
  Append<float>(p, team).run();
}

extern const Kernels kKernels;
const Kernels kKernels = {ATTNKIT_ISA_NAME, run<Forward>, row_sums,  run<Backward>, bias_gradient,
                          decode,           append,       probe_fma, probe_read};
