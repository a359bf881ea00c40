// Every decoding kernel and what its launch asks for, as tab-separated lines:
//   kernel  threads  shared bytes  bytes of keys and values that are on their way while a tile is
//   used
// With arguments REGISTERS THREADS SHARED ARCHITECTURE instead: the blocks that an SM has room for.
#include <cuda_occupancy.h>
#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <typeinfo>

#include "../../csrc/cuda/decode.cuh"

namespace {

using namespace attnkit::cuda;

template <class Compute>
void row() {
  using Stored = typename Compute::Stored;
  const size_t tiles = Compute::kWidens ? 2 : 1;
  const size_t bytes =
      tiles * sizeof(Stored) * (Compute::kDim + Compute::kValueDim) * Compute::kTile;
  char* name = abi::__cxa_demangle(typeid(Compute).name(), nullptr, nullptr, nullptr);
  printf("%s\t%d\t%zu\t%zu\n", name, kThreads, Compute::kSharedBytes, bytes);
  free(name);
}

template <class T, int kDim, int kValueDim>
void rows_16_bit() {
  row<VectorCompute<T, 1, kDim, kValueDim>>();
  row<MmaCompute<T, false, kDim, kValueDim, 1>>();
  row<MmaCompute<T, false, kDim, kValueDim, 4>>();
  row<MmaCompute<T, true, kDim, kValueDim, 1>>();
  row<MmaCompute<T, true, kDim, kValueDim, 4>>();
}

template <int kDim, int kValueDim>
void rows() {
  rows_16_bit<__nv_bfloat16, kDim, kValueDim>();
  rows_16_bit<__half, kDim, kValueDim>();
  row<VectorCompute<uint8_t, 4, kDim, kValueDim>>();
  row<VectorCompute<float, 4, kDim, kValueDim>>();
}

int resident_blocks(int registers, int threads, size_t shared, int architecture) {
  const bool ampere = architecture < 90;
  cudaOccDeviceProp device{};
  device.computeMajor = architecture / 10, device.computeMinor = architecture % 10;
  device.maxThreadsPerBlock = 1024, device.maxThreadsPerMultiprocessor = 2048;
  device.regsPerBlock = device.regsPerMultiprocessor = 65536;
  device.warpSize = 32;
  device.sharedMemPerBlock = 48 << 10;
  device.sharedMemPerMultiprocessor = (ampere ? 164 : 228) << 10;
  device.sharedMemPerBlockOptin = (ampere ? 163 : 227) << 10;
  device.reservedSharedMemPerBlock = 1 << 10;
  device.numSms = ampere ? 108 : 132;
  cudaOccFuncAttributes kernel{};
  kernel.maxThreadsPerBlock = threads, kernel.numRegs = registers;
  kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
  kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
  kernel.maxDynamicSharedSizeBytes = device.sharedMemPerBlockOptin;
  kernel.numBlockBarriers = 1;
  cudaOccDeviceState state{};
  state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
  cudaOccResult result{};
  const auto error =
      cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, shared);
  return error == CUDA_OCC_SUCCESS ? result.activeBlocksPerMultiprocessor : -1;
}

}  // namespace

int main(int count, char** words) {
  if (count == 1) {
#define ATTNKIT_ROWS(D, DV) rows<D, DV>();
    ATTNKIT_HEAD_DIMS(ATTNKIT_ROWS)
    return 0;
  }
  for (int i = 1; i + 3 < count; i += 4)
    printf("%d\n", resident_blocks(atoi(words[i]), atoi(words[i + 1]),
                                   static_cast<size_t>(atol(words[i + 2])), atoi(words[i + 3])));
  return 0;
}
