// Runs CUDA kernels on the host: one fiber per CUDA thread, one block after the other.
//
// Deterministic: a thread runs until it waits, and who comes next is given by `options.order`.
// A misuse that a GPU would not notice, or answer with a hang, ends the launch with last_error.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>
#include <type_traits>
#include <utility>

namespace emulator {

using Place = std::source_location;

struct Options {
  unsigned order = 0;  // of blocks and threads: 0 forward, 1 reverse, n > 1 shuffled with seed n
};
extern Options options;
extern std::string last_error;              // why the last launch failed; "" if it did not
extern long launches, threads, attributes;  // launched and set, since the start

[[noreturn]] void fail(const std::string& message, Place place);

// ---- launching
using Body = void (*)(void*);
cudaError_t run(dim3 grid, dim3 block, size_t shared, Body body, void* argument,
                const void* kernel);
cudaError_t get_device(int* device);  // there is one, 0
cudaError_t set_attribute(const void* kernel, cudaFuncAttribute attribute, int value);

template <class... P, class... A>
cudaError_t launch(const cudaLaunchConfig_t* c, void (*kernel)(P...), A&&... arguments) {
  const auto with = [&](P... p) {
    auto call = [&] { kernel(p...); };
    return run(
        c->gridDim, c->blockDim, c->dynamicSmemBytes,
        [](void* x) { (*static_cast<decltype(call)*>(x))(); }, &call,
        reinterpret_cast<const void*>(kernel));
  };
  return with(std::forward<A>(arguments)...);
}

// ---- block barriers
enum class Vote { kCount, kAnd, kOr };
int block_barrier(int predicate, Vote vote, Place place);

// ---- warp operations: every live lane of the mask has to meet in the same one
enum class WarpOp { kShuffle, kBallot, kSync, kReduce, kMma, kLoadMatrix };
struct Lanes {  // what the lanes brought, and which of them took part
  const unsigned char (*deposit)[32];
  unsigned live;
};
Lanes meet(unsigned mask, WarpOp op, const void* deposit, int bytes, Place place);
unsigned lane();
void shuffle(unsigned mask, void* value, int bytes, int width, int source, Place place);
unsigned ballot(unsigned mask, int predicate, Place place);
void sync_warp(unsigned mask, Place place);

template <class T, class F>
T reduce(unsigned mask, T value, F combine, Place place) {
  const Lanes lanes = meet(mask, WarpOp::kReduce, &value, sizeof(T), place);
  bool first = true;
  T sum{};
  for (int i = 0; i < 32; ++i) {
    if (!(lanes.live >> i & 1)) continue;
    T x;
    __builtin_memcpy(&x, lanes.deposit[i], sizeof(T));
    sum = first ? x : combine(sum, x);
    first = false;
  }
  return sum;
}

// ---- memory
void hide(void* p, size_t bytes);  // whole pages, which from now on only running kernels may touch
void fence();
void copy_async(void* to, const void* from, size_t bytes, size_t zeros, Place place);
void commit_copies();
void wait_for_copies(unsigned groups_left);
struct Carving {
  size_t device = 0;  // bytes used as the device counts them
  size_t host = 0;    // the same with red zones
};
void* take_shared(Carving& carving, size_t bytes, size_t align, Place place = Place::current());

// ---- tensor cores
enum class Half { kBFloat16, kFloat16 };
void mma_m16n8k16(Half type, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                  Place place);
void load_matrices(uint32_t* r, int count, bool transposed, const void* row, Place place);

}  // namespace emulator
