// What every kernel uses: shared memory, tensor cores, conversions, reductions, refusals.
//
// The kernels also run in an emulator on the host (tests/cuda_emulator); whatever has to be written
// twice for that is in this file.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "params.h"

#ifdef __CUDACC__
// What assert() calls; declared by CUDA only where NDEBUG does not switch assert() off.
extern "C" __host__ __device__ void __assert_fail(const char* message, const char* file,
                                                  unsigned line, const char* function) noexcept;
#endif

namespace attnkit::cuda {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr unsigned kAllLanes = 0xffffffffu;

// Ends the launch, and the context with it, as PyTorch's own kernels do for an index out of range.
#ifdef CUDA_EMULATOR
#define ATTNKIT_REQUIRE(condition, message) \
  if (!(condition)) emulator::fail(message, emulator::Place::current())
#else
#define ATTNKIT_REQUIRE(condition, message) \
  if (!(condition)) __assert_fail(message, __FILE__, __LINE__, __func__)
#endif

// Dynamic shared memory, taken piece by piece: the only one that the kernels use.
class Shared {
 public:
  template <class T>
  __device__ __forceinline__ T* take(size_t n) {
#ifdef CUDA_EMULATOR
    return static_cast<T*>(emulator::take_shared(carving_, n * sizeof(T), 16));
#else
    extern __shared__ __align__(128) unsigned char attnkit_shared[];
    T* p = reinterpret_cast<T*>(attnkit_shared + used_);
    used_ += (n * sizeof(T) + 15) / 16 * 16;
    return p;
#endif
  }

 private:
#ifdef CUDA_EMULATOR
  emulator::Carving carving_;
#else
  size_t used_ = 0;
#endif
};

// The bytes that Shared counts for n elements.
template <class T>
constexpr size_t shared_bytes(size_t n) {
  return (n * sizeof(T) + 15) / 16 * 16;
}

// Launches a kernel, given as the template's argument: each has a record of its own of the devices
// that know how much shared memory it may have, so that only its first launch there tells them.
template <auto kKernel, class... P>
cudaError_t launch(int64_t blocks, int threads, size_t shared, cudaStream_t stream,
                   const P&... arguments) {
  if (shared > (48u << 10)) {
    static std::atomic<uint64_t> told{0};  // a bit per device; one without a bit is told each time
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if (!(told.load(std::memory_order_relaxed) & bit)) {
      const cudaError_t error = cudaFuncSetAttribute(
          kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
      if (error != cudaSuccess) return error;
      told.fetch_or(bit, std::memory_order_relaxed);
    }
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kKernel, arguments...);
}

// ---- tensor cores

// d[16, 8] += a[16, 16] b[16, 8].  Lane 4 g + t holds rows g and g + 8 of a and d, column g of b.
template <class T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>);
#ifdef CUDA_EMULATOR
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  emulator::mma_m16n8k16(kBf16 ? emulator::Half::kBFloat16 : emulator::Half::kFloat16, d, a,
                         {b0, b1}, emulator::Place::current());
#else
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Four 8 x 8 matrices of 16-bit values; lane 8 m + i brings the address of row i of matrix m.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) {
#ifdef CUDA_EMULATOR
  emulator::load_matrices(r, 4, kTransposed, row, emulator::Place::current());
#else
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
#endif
}

// ---- numbers

template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, 4);
    return bits;
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, 4);
    return bits;
  }
}

template <class T>
__device__ __forceinline__ float2 unpack(uint32_t bits) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  __half2 pair;
  memcpy(&pair, &bits, 4);
  return __half22float2(pair);
}

// float8_e4m3fn: in the place of a float16 the bits mean 2^-8 of the value.
__device__ __forceinline__ float from_fp8(uint32_t byte) {
  const uint32_t magnitude = byte & 0x7f, nan = magnitude == 0x7f ? 0x7c00u : 0u;
  __half_raw raw;
  raw.x = static_cast<unsigned short>((byte & 0x80) << 8 | magnitude << 7 | nan);
  return __half2float(__half(raw)) * 256.f;
}

__device__ __forceinline__ float from_int8(uint32_t byte) {
  return static_cast<float>(static_cast<int8_t>(byte & 0xff));
}

// One value of a row, whatever its dtype.
__device__ __forceinline__ float load_value(const Array& a, const void* row, int64_t column) {
  const int64_t at = column * a.column;
  switch (a.dtype) {
    case DType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(row)[at]);
    case DType::kFloat16:
      return __half2float(static_cast<const __half*>(row)[at]);
    default:
      return static_cast<const float*>(row)[at];
  }
}

__device__ __forceinline__ void store_value(const Array& a, void* row, int64_t column, float x) {
  const int64_t at = column * a.column;
  switch (a.dtype) {
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(row)[at] = __float2bfloat16(x);
      break;
    case DType::kFloat16:
      static_cast<__half*>(row)[at] = __float2half(x);
      break;
    default:
      static_cast<float*>(row)[at] = x;
  }
}

__host__ __device__ __forceinline__ int bytes_of(DType dtype) {
  if (dtype == DType::kFloat32) return 4;
  return dtype == DType::kInt8 || dtype == DType::kFloat8 ? 1 : 2;
}

__device__ __forceinline__ char* row_of(const Array& a, int64_t batch, int64_t head, int64_t row) {
  return static_cast<char*>(a.data) +
         (batch * a.batch + head * a.head + row * a.row) * bytes_of(a.dtype);
}

__device__ __forceinline__ int quotient(int n, Divisor by) {
  return static_cast<int>((__umulhi(static_cast<unsigned>(n), by.magic) + n) >> by.shift);
}

// ---- a warp's lanes, or segments of kWidth of them

template <int kWidth>
__device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
  for (int o = kWidth / 2; o; o /= 2) x += __shfl_xor_sync(kAllLanes, x, o);
  return x;
}
template <int kWidth>
__device__ __forceinline__ float max_lanes(float x) {
#pragma unroll
  for (int o = kWidth / 2; o; o /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, o));
  return x;
}

// What exponents are taken relative to: a row that has seen no key has the maximum -inf, and a
// finite pivot keeps exp2(-inf - pivot) at 0, not NaN.
__device__ __forceinline__ float pivot_of(float maximum) {
  return maximum == -INFINITY ? 0.f : maximum;
}

}  // namespace attnkit::cuda
