// CUDA's spelling for what runtime.h emulates.  A kernel file is compiled by the host's compiler as
//   g++ -std=c++20 -x c++ -include cuda_emulator.h -I<CUDA headers> -c kernel.cu
//
// Supported: __syncthreads*, __syncwarp, shuffles, ballots, reductions, atomics, fences, cp.async
// through __pipeline_*, launches through cudaLaunchKernelEx, dynamic shared memory that is carved
// by emulator::take_shared (full of NaN, with red zones), mma.m16n8k16 and ldmatrix. Not: static
// __shared__, TMA, mbarrier, wgmma, clusters, inline PTX.
#pragma once

#define CUDA_EMULATOR 1
#define _CUDA_PIPELINE_H_  // cp.async comes from here, not from NVIDIA's headers
#define _CUDA_PIPELINE_PRIMITIVES_H_
#define _CUDA_PIPELINE_HELPERS_H_
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>

#include "runtime.h"

// Variables, not macros: a parameter may be called gridDim.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

#undef __shared__
#define __shared__ static_shared_memory_is_not_emulated_use_dynamic
constexpr int warpSize = 32;
#undef __launch_bounds__
#define __launch_bounds__(...)
#define cudaLaunchKernelEx ::emulator::launch
#define cudaGetDevice ::emulator::get_device
#define cudaFuncSetAttribute(kernel, attribute, value) \
  ::emulator::set_attribute(reinterpret_cast<const void*>(kernel), attribute, value)
#define HERE ::emulator::Place place = ::emulator::Place::current()

inline void __syncthreads(HERE) { emulator::block_barrier(0, emulator::Vote::kCount, place); }
inline int __syncthreads_count(int p, HERE) {
  return emulator::block_barrier(p, emulator::Vote::kCount, place);
}
inline int __syncthreads_and(int p, HERE) {
  return emulator::block_barrier(p, emulator::Vote::kAnd, place);
}
inline int __syncthreads_or(int p, HERE) {
  return emulator::block_barrier(p, emulator::Vote::kOr, place);
}
inline void __syncwarp(unsigned mask = ~0u, HERE) { emulator::sync_warp(mask, place); }

// A source outside the segment of `width` lanes stands for the lane itself.
template <class T>
T __shfl_sync(unsigned mask, T v, int source, int width = 32, HERE) {
  const int segment = static_cast<int>(emulator::lane()) & ~(width - 1);
  emulator::shuffle(mask, &v, sizeof v, width, segment + (source & (width - 1)), place);
  return v;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int with, int width = 32, HERE) {
  emulator::shuffle(mask, &v, sizeof v, width, static_cast<int>(emulator::lane()) ^ with, place);
  return v;
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32, HERE) {
  emulator::shuffle(mask, &v, sizeof v, width, static_cast<int>(emulator::lane() + by), place);
  return v;
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32, HERE) {
  const int source = static_cast<int>(emulator::lane()) - static_cast<int>(by);
  emulator::shuffle(mask, &v, sizeof v, width, source, place);
  return v;
}
inline unsigned __ballot_sync(unsigned mask, int p, HERE) {
  return emulator::ballot(mask, p, place);
}
inline int __any_sync(unsigned mask, int p, HERE) { return emulator::ballot(mask, p, place) != 0; }
inline int __all_sync(unsigned mask, int p, HERE) { return emulator::ballot(mask, !p, place) == 0; }
template <class T>
T __reduce_max_sync(unsigned mask, T v, HERE) {
  return emulator::reduce(mask, v, [](T a, T b) { return a > b ? a : b; }, place);
}
template <class T>
T __reduce_add_sync(unsigned mask, T v, HERE) {
  return emulator::reduce(mask, v, [](T a, T b) { return static_cast<T>(a + b); }, place);
}

inline void __pipeline_memcpy_async(void* to, const void* from, size_t n, size_t zeros = 0, HERE) {
  emulator::copy_async(to, from, n, zeros, place);
}
inline void __pipeline_commit() { emulator::commit_copies(); }
inline void __pipeline_wait_prior(unsigned left) { emulator::wait_for_copies(left); }
inline void __threadfence() { emulator::fence(); }
inline void __threadfence_block() { emulator::fence(); }

// Relaxed, as on the device: an atomic operation orders nothing else.
constexpr auto kRelaxed = std::memory_order_relaxed;
template <class T>
T atomicAdd(T* p, std::type_identity_t<T> v) {
  return std::atomic_ref<T>(*p).fetch_add(v, kRelaxed);
}
template <class T>
T atomicExch(T* p, std::type_identity_t<T> v) {
  return std::atomic_ref<T>(*p).exchange(v, kRelaxed);
}
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> v) {
  std::atomic_ref<T>(*p).compare_exchange_strong(expected, v, kRelaxed);
  return expected;
}
inline unsigned atomicInc(unsigned* p, unsigned last) {
  std::atomic_ref<unsigned> r(*p);
  unsigned old = r.load(kRelaxed);
  while (!r.compare_exchange_weak(old, old >= last ? 0 : old + 1, kRelaxed)) {
  }
  return old;
}

template <class T>
T __ldg(const T* p) {
  return *p;
}
inline float __int_as_float(int v) { return std::bit_cast<float>(v); }
inline float __uint_as_float(unsigned v) { return std::bit_cast<float>(v); }
inline int __float_as_int(float v) { return std::bit_cast<int>(v); }
inline unsigned __float_as_uint(float v) { return std::bit_cast<unsigned>(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
[[noreturn]] inline void __trap(HERE) { emulator::fail("__trap()", place); }
using std::isfinite;
using std::max;
using std::min;

#undef HERE
