// Small kernels for test_cuda_emulator.py: some right, some with the one mistake of their name.
//   selftest ORDER NAMES...      prints "ok" or what is wrong, for each
#include <cuda_pipeline_primitives.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#ifndef CUDA_EMULATOR
#error "this file is for the emulator"
#endif

namespace {

using emulator::Carving;
using emulator::take_shared;

constexpr int kThreads = 64;
constexpr float kBad = -1;

template <class T>
T* take(Carving& c, size_t n) {
  return static_cast<T*>(take_shared(c, n * sizeof(T), 16));
}

// ---- sums of a block's threads: what a barrier, a shuffle and an atomic have to give

enum class Flaw {
  kNone,
  kNoBarrier,
  kSomeMissBarrier,
  kTwoBarriers,
  kExitedLane,
  kBeyondShared,
  kTooMuchShared,
  kHalfMask,
  kOverlap,
  kUnwritten,
  kTrap
};

__global__ void block_sum(Flaw flaw, const float* x, float* out) {
  Carving c;
  float* warp = take<float>(c, flaw == Flaw::kTooMuchShared ? 4096 : 2);
  const int i = threadIdx.x;
  if (flaw == Flaw::kTrap && i == 40) __trap();
  if (flaw == Flaw::kExitedLane && i == 63) return;
  float v = x[blockIdx.x * kThreads + i];
  unsigned mask = ~0u;
  if (flaw == Flaw::kHalfMask) mask = i % 32 < 16 ? 0xffff : 0xff;
  if (flaw == Flaw::kOverlap) mask = i % 32 < 16 ? ~0u : 0xffff0000u;
  for (int o = 16; o; o /= 2) v += __shfl_xor_sync(mask, v, o);
  if (i % 32 == 0 && flaw != Flaw::kUnwritten) warp[i / 32] = v;
  if (flaw == Flaw::kBeyondShared && i == 0) warp[2] = v;
  if (flaw == Flaw::kSomeMissBarrier) {
    if (i < 32) __syncthreads();
  } else if (flaw == Flaw::kTwoBarriers) {
    if (i < 32)
      __syncthreads();
    else
      __syncthreads();
  } else if (flaw != Flaw::kNoBarrier) {
    __syncthreads();
  }
  if (i == 0) out[blockIdx.x] = warp[0] + warp[1];
}

// ---- a copy from one warp's lanes to another's, through cp.async

enum class Late { kNone, kNoWait, kNoSyncWarp, kMisaligned, kWrongSize };

__global__ void through_shared(Late flaw, const float* x, float* out) {
  Carving c;
  float* to = take<float>(c, 128);
  const int i = threadIdx.x, skew = flaw == Late::kMisaligned ? 1 : 0;
  __pipeline_memcpy_async(to + 4 * i, x + 4 * i + skew, flaw == Late::kWrongSize ? 12 : 16,
                          i == 31 ? 8 : 0);
  __pipeline_commit();
  if (flaw != Late::kNoWait) __pipeline_wait_prior(0);
  if (flaw != Late::kNoSyncWarp) __syncwarp();
  for (int k = 0; k < 4; ++k) out[4 * i + k] = to[4 * (31 - i) + k];
}

// ---- 16 bytes at a time

__global__ void by_sixteen(bool aligned, const float* x, float* out) {
  const int i = threadIdx.x;
  const float4 four = *reinterpret_cast<const float4*>(x + 4 * i + (aligned ? 0 : 2));
  out[i] = four.x + four.y + four.z + four.w;
}

// ---- blocks that add up, the last of them finishing

__global__ void last_block(bool fenced, const float* x, float* parts, unsigned* counter,
                           float* out) {
  if (threadIdx.x) return;
  parts[blockIdx.x] = x[blockIdx.x];
  if (fenced) __threadfence();
  const bool last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
  if (fenced) __threadfence();
  if (!last) return;
  float sum = 0;
  for (unsigned i = 0; i < gridDim.x; ++i) sum += parts[i];
  *out = sum;
}

// ---- one tensor-core product against plain sums

__global__ void product(bool half, const uint16_t* a, const uint16_t* b, float* d) {
  Carving c;
  uint16_t* sa = take<uint16_t>(c, 16 * 24);  // rows of 48 bytes
  uint16_t* sb = take<uint16_t>(c, 16 * 24);
  const int lane = threadIdx.x;
  for (int i = lane; i < 16 * 16; i += 32) sa[i / 16 * 24 + i % 16] = a[i];
  for (int i = lane; i < 16 * 8; i += 32) sb[i / 8 * 24 + i % 8] = b[i];
  __syncwarp();
  uint32_t fa[4], fb[2];
  const auto place = emulator::Place::current();
  emulator::load_matrices(fa, 4, false, sa + lane % 16 * 24 + lane / 16 * 8, place);
  emulator::load_matrices(fb, 2, true, sb + lane % 16 * 24, place);
  float acc[4] = {};
  emulator::mma_m16n8k16(half ? emulator::Half::kFloat16 : emulator::Half::kBFloat16, acc, fa, fb,
                         place);
  for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + 2 * (lane % 4) + i % 2] = acc[i];
}

template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), int blocks, int count, size_t shared, A... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(count), config.dynamicSmemBytes = shared;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

std::string verdict(cudaError_t error, bool right) {
  if (error != cudaSuccess) return emulator::last_error;
  return right ? "ok" : "wrong numbers";
}

std::string run_sum(Flaw flaw, int blocks = 3) {
  std::vector<float> x(blocks * kThreads), out(blocks, kBad);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
  const auto error = launch(block_sum, blocks, kThreads, 64, flaw,
                            static_cast<const float*>(x.data()), out.data());
  bool right = true;
  for (int b = 0; b < blocks; ++b)
    right &= out[b] == kThreads * (b * kThreads + (kThreads - 1) / 2.f);
  return verdict(error, right);
}

std::string run_copy(Late flaw) {
  std::vector<float> x(128), out(128, kBad);
  for (int i = 0; i < 128; ++i) x[i] = static_cast<float>(i);
  const auto error =
      launch(through_shared, 1, 32, 1024, flaw, static_cast<const float*>(x.data()), out.data());
  bool right = true;
  for (int i = 0; i < 128; ++i) {
    const int from = 4 * (31 - i / 4) + i % 4;
    right &= out[i] == (from >= 126 ? 0.f : static_cast<float>(from));
  }
  return verdict(error, right);
}

std::string run_sixteen(bool aligned) {
  std::vector<float4> room(33);
  float* x = &room[0].x;
  std::vector<float> out(32, kBad);
  for (int i = 0; i < 132; ++i) x[i] = static_cast<float>(i);
  const auto error =
      launch(by_sixteen, 1, 32, 0, aligned, static_cast<const float*>(x), out.data());
  bool right = true;
  for (int i = 0; i < 32; ++i) right &= out[i] == 16 * i + (aligned ? 6 : 14);
  return verdict(error, right);
}

std::string run_last(bool fenced) {
  std::vector<float> x(6, 1.f), parts(6, kBad);
  unsigned counter = 0;
  float out = kBad;
  const auto error = launch(last_block, 6, 32, 0, fenced, static_cast<const float*>(x.data()),
                            parts.data(), &counter, &out);
  return verdict(error, out == 6);
}

std::string run_product(bool half) {
  std::vector<uint16_t> a(256), b(128);
  std::vector<float> d(128, kBad);
  const auto number = [&](int i) { return static_cast<float>(i % 7 - 3) / 2; };
  const auto bits = [&](float x) -> uint16_t {
    if (half) return std::bit_cast<uint16_t>(__half_raw(__float2half(x)));
    return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
  };
  for (int i = 0; i < 256; ++i) a[i] = bits(number(3 * i + i / 16));
  for (int i = 0; i < 128; ++i) b[i] = bits(number(5 * i + i / 8));
  const auto error = launch(product, 1, 32, 2048, half, static_cast<const uint16_t*>(a.data()),
                            static_cast<const uint16_t*>(b.data()), d.data());
  bool right = true;
  for (int r = 0; r < 16; ++r)
    for (int n = 0; n < 8; ++n) {
      float sum = 0;
      for (int k = 0; k < 16; ++k) {
        const int i = r * 16 + k, j = k * 8 + n;
        sum += number(3 * i + i / 16) * number(5 * j + j / 8);
      }
      right &= d[r * 8 + n] == sum;
    }
  return verdict(error, right);
}

const std::map<std::string, std::function<std::string()>> kCases = {
    {"sum", [] { return run_sum(Flaw::kNone); }},
    {"sum-without-barrier", [] { return run_sum(Flaw::kNoBarrier); }},
    {"sum-some-miss-the-barrier", [] { return run_sum(Flaw::kSomeMissBarrier); }},
    {"sum-two-barriers", [] { return run_sum(Flaw::kTwoBarriers); }},
    {"sum-exited-lane", [] { return run_sum(Flaw::kExitedLane); }},
    {"sum-beyond-shared", [] { return run_sum(Flaw::kBeyondShared); }},
    {"sum-too-much-shared", [] { return run_sum(Flaw::kTooMuchShared); }},
    {"sum-half-mask", [] { return run_sum(Flaw::kHalfMask); }},
    {"sum-overlapping-masks", [] { return run_sum(Flaw::kOverlap); }},
    {"sum-unwritten", [] { return run_sum(Flaw::kUnwritten); }},
    {"sum-trap", [] { return run_sum(Flaw::kTrap); }},
    {"copy", [] { return run_copy(Late::kNone); }},
    {"copy-without-wait", [] { return run_copy(Late::kNoWait); }},
    {"copy-without-syncwarp", [] { return run_copy(Late::kNoSyncWarp); }},
    {"copy-misaligned", [] { return run_copy(Late::kMisaligned); }},
    {"copy-of-12-bytes", [] { return run_copy(Late::kWrongSize); }},
    {"sixteen", [] { return run_sixteen(true); }},
    {"sixteen-misaligned", [] { return run_sixteen(false); }},
    {"last-block", [] { return run_last(true); }},
    {"last-block-without-fence", [] { return run_last(false); }},
    {"product-bf16", [] { return run_product(false); }},
    {"product-fp16", [] { return run_product(true); }},
};

}  // namespace

int main(int count, char** words) {
  if (count < 3) return 2;
  emulator::options.order = static_cast<unsigned>(atoi(words[1]));
  for (int i = 2; i < count; ++i) {
    if (!kCases.count(words[i])) return 2;
    printf("%s\n", kCases.at(words[i])().c_str());
  }
  return 0;
}
