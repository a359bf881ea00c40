// Fibers, and the places where they wait for one another.
#include "scheduler.h"

#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>

#include "context_switch.h"
#include "sanitizers.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {

Options options;
std::string last_error;
long launches, threads, attributes;

namespace {

struct Failure {};  // unwinds the fiber that failed

// Lanes that meet under one mask.  Two generations: some may still read what others deposited.
struct Group {
  unsigned mask = 0, arrived = 0, generation = 0;
  WarpOp op[2];
  int bytes[2];
  unsigned live[2];
  char tag[2];
  unsigned char deposit[2][32][32];
};

constexpr size_t kStack = 256 << 10;
constexpr unsigned kMaxThreads = 1024;
#ifdef EMULATOR_TSAN
// Blocks this far apart share the fibers that TSan sees, so it takes them for ordered.
constexpr unsigned kFiberSets = 4;
void* tsan_fibers[kFiberSets][kMaxThreads];
void* tsan_main;
#else
constexpr unsigned kFiberSets = 1;
#endif

std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<std::vector<std::unique_ptr<Group>>> groups;  // of each warp
Fiber* current;
char *stacks, start_tag, end_tag, fence_tag;
size_t stacks_bytes;
unsigned blocks_run;
std::map<const void*, int> shared_limit;

void* main_pointer;
[[maybe_unused]] void* main_fake_stack;
[[maybe_unused]] const void* main_bottom;
[[maybe_unused]] size_t main_size;

struct {
  unsigned generation, arrived, living;
  int votes[2][3];
  Place place;
} barrier;
bool failed;
Body body;
void* body_argument;

std::string name(const Fiber& f) {
  return "block (" + std::to_string(blockIdx.x) + "," + std::to_string(blockIdx.y) + "," +
         std::to_string(blockIdx.z) + ") thread " + std::to_string(f.index);
}

std::string shown(Place p) { return std::string(p.file_name()) + ":" + std::to_string(p.line()); }

void to_main([[maybe_unused]] bool for_good = false) {
  Fiber& f = self();
#ifdef EMULATOR_TSAN
  __tsan_switch_to_fiber(tsan_main, 1);  // 1: a switch orders nothing
#endif
#ifdef EMULATOR_ASAN
  __sanitizer_start_switch_fiber(for_good ? nullptr : &f.fake_stack, main_bottom, main_size);
#endif
  emulator_switch(&f.stack_pointer, main_pointer);
#ifdef EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(f.fake_stack, &main_bottom, &main_size);
#endif
}

void to_fiber(Fiber& f) {
  current = &f;
  threadIdx = f.thread;
#ifdef EMULATOR_TSAN
  __tsan_switch_to_fiber(f.tsan, 1);
#endif
#ifdef EMULATOR_ASAN
  __sanitizer_start_switch_fiber(&main_fake_stack, f.stack, kStack);
#endif
  emulator_switch(&main_pointer, f.stack_pointer);
#ifdef EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(main_fake_stack, nullptr, nullptr);
#endif
  current = nullptr;
}

void open_barrier() {
  barrier.arrived = 0;
  int* next = barrier.votes[++barrier.generation & 1];
  next[0] = 0, next[1] = 1, next[2] = 0;
  for (auto& f : fibers)
    if (f->state == State::kAtBarrier) f->state = State::kReady;
}

unsigned living(unsigned warp) {
  unsigned mask = 0;
  for (unsigned i = 0; i < 32 && warp * 32 + i < fibers.size(); ++i)
    if (fibers[warp * 32 + i]->state != State::kDone) mask |= 1u << i;
  return mask;
}

void complete(Group& g, unsigned warp) {
  g.live[g.generation & 1] = g.arrived;
  ++g.generation;
  g.arrived = 0;
  for (unsigned i = 0; i < 32 && warp * 32 + i < fibers.size(); ++i) {
    Fiber& f = *fibers[warp * 32 + i];
    if ((g.mask >> i & 1) && f.state == State::kInWarp) f.state = State::kReady;
  }
}

void fiber_main() {
#ifdef EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &main_bottom, &main_size);
#endif
  acquire(&start_tag);
  try {
    body(body_argument);
  } catch (Failure&) {
  }
  release(&end_tag);
  {
    const Unwatched unwatched;
    Fiber& f = self();
    f.state = State::kDone;
    --barrier.living;
    if (!failed) {  // those that wait for it need not any longer
      if (barrier.living && barrier.arrived == barrier.living) open_barrier();
      const unsigned warp = f.index / 32, left = living(warp);
      for (auto& g : groups[warp])
        if (g->arrived && g->arrived == (g->mask & left)) complete(*g, warp);
    }
  }
  to_main(true);
  __builtin_trap();
}

void report_deadlock() {
  last_error = "deadlock:";
  int named = 0;
  for (auto& f : fibers) {
    if (f->state == State::kDone || ++named > 6) continue;
    last_error += "\n  " + name(*f) + " waits in " +
                  (f->state == State::kAtBarrier ? "__syncthreads " : "a warp operation ") +
                  shown(f->waits_at);
  }
  failed = true;
}

void set_up(Fiber& f, unsigned index, dim3 block, unsigned set) {
  f.index = index;
  f.thread = {index % block.x, index / block.x % block.y, index / block.x / block.y};
  f.state = State::kReady;
  f.stack = stacks + (set * fibers.size() + index) * kStack;
  f.stack_pointer = emulator_prepare(f.stack + kStack - 64, fiber_main);
  f.committed.clear();
  f.open.clear();
#ifdef EMULATOR_TSAN
  void*& fiber = tsan_fibers[set][index];
  if (!fiber) fiber = __tsan_create_fiber(0);
  f.tsan = fiber;
#endif
}

// Fibers that never came to their end.
void abandon([[maybe_unused]] unsigned set) {
#ifdef EMULATOR_TSAN
  for (unsigned i = 0; i < fibers.size(); ++i) {
    __tsan_switch_to_fiber(fibers[i]->tsan, 0);
    __tsan_switch_to_fiber(tsan_main, 0);
    __tsan_destroy_fiber(fibers[i]->tsan);
    tsan_fibers[set][i] = nullptr;
  }
#endif
  allow(stacks, stacks_bytes);
}

bool run_block(uint3 index, dim3 block, size_t shared_bytes, std::mt19937& random) {
  const Unwatched unwatched;
  const unsigned set = blocks_run++ % kFiberSets;
  const unsigned n = static_cast<unsigned>(fibers.size());
  new_shared_memory(shared_bytes);
  release(&start_tag);
  blockIdx = index;
  groups.clear();
  groups.resize((n + 31) / 32);
  barrier = {0, 0, n, {{0, 1, 0}, {0, 1, 0}}, Place::current()};
  failed = false;
  std::vector<unsigned> order(n);
  for (unsigned i = 0; i < n; ++i) {
    set_up(*fibers[i], i, block, set);
    order[i] = options.order == 1 ? n - 1 - i : i;
  }
  if (options.order > 1) std::shuffle(order.begin(), order.end(), random);
  while (barrier.living && !failed) {
    bool any = false;
    for (unsigned i : order) {
      if (fibers[i]->state != State::kReady) continue;
      any = true;
      to_fiber(*fibers[i]);
      if (failed) break;
    }
    if (!any && !failed) report_deadlock();
  }
  if (failed) abandon(set);
  free_shared_memory();
  threads += n;
  return !failed;
}

}  // namespace

Fiber& self() { return *current; }

void wait_as(State state, Place place) {
  Fiber& f = self();
  f.state = state;
  f.waits_at = place;
  to_main();
}

void fail(const std::string& message, Place place) {
  const Unwatched unwatched;
  last_error = message + "\n  " + name(self()) + " at " + shown(place);
  failed = true;
  throw Failure{};
}

int block_barrier(int predicate, Vote vote, Place place) {
  if (!barrier.arrived)
    barrier.place = place;
  else if (place.line() != barrier.place.line())
    fail("threads of one block meet at different barriers, " + shown(barrier.place) + " and " +
             shown(place),
         place);
  const unsigned generation = barrier.generation;
  int* votes = barrier.votes[generation & 1];
  votes[0] += predicate != 0;
  votes[1] &= predicate != 0;
  votes[2] |= predicate != 0;
  release(barrier_tag(generation));
  if (++barrier.arrived == barrier.living)
    open_barrier();
  else
    wait_as(State::kAtBarrier, place);
  acquire(barrier_tag(generation));
  return votes[static_cast<int>(vote)];
}

unsigned lane() { return self().index % 32; }

Lanes meet(unsigned mask, WarpOp op, const void* deposit, int bytes, Place place) {
  const unsigned warp = self().index / 32, own = lane();
  Group* group = nullptr;
  unsigned slot;
  bool all;
  {
    const Unwatched unwatched;
    if (!(mask >> own & 1)) fail("the calling lane is not in the mask", place);
    for (auto& g : groups[warp]) {
      if (g->mask == mask)
        group = g.get();
      else if (g->arrived & mask)
        fail("lanes of one warp use overlapping masks", place);
    }
    if (!group) {
      groups[warp].push_back(std::make_unique<Group>());
      group = groups[warp].back().get();
      group->mask = mask;
    }
    slot = group->generation & 1;
    if (!group->arrived)
      group->op[slot] = op, group->bytes[slot] = bytes;
    else if (group->op[slot] != op || group->bytes[slot] != bytes)
      fail("lanes of one warp meet in different warp operations", place);
    if (bytes) __builtin_memcpy(group->deposit[slot][own], deposit, bytes);
    group->arrived |= 1u << own;
    all = group->arrived == (mask & living(warp));
  }
  // of all warp operations only __syncwarp orders what the lanes did to memory
  if (op == WarpOp::kSync) release(&group->tag[slot]);
  if (all)
    complete(*group, warp);
  else
    wait_as(State::kInWarp, place);
  if (op == WarpOp::kSync) acquire(&group->tag[slot]);
  return {group->deposit[slot], group->live[slot]};
}

void sync_warp(unsigned mask, Place place) { meet(mask, WarpOp::kSync, nullptr, 0, place); }

void shuffle(unsigned mask, void* value, int bytes, int width, int source, Place place) {
  if (width < 1 || width > 32 || (width & (width - 1)))
    fail("a shuffle's width is " + std::to_string(width), place);
  const Lanes lanes = meet(mask, WarpOp::kShuffle, value, bytes, place);
  const int own = static_cast<int>(lane()), segment = own & ~(width - 1);
  if (source < segment || source >= segment + width) source = own;
  if (!(lanes.live >> source & 1))
    fail("a shuffle reads lane " + std::to_string(source) + ", which does not take part", place);
  __builtin_memcpy(value, lanes.deposit[source], bytes);
}

unsigned ballot(unsigned mask, int predicate, Place place) {
  const unsigned char yes = predicate != 0;
  const Lanes lanes = meet(mask, WarpOp::kBallot, &yes, 1, place);
  unsigned found = 0;
  for (int i = 0; i < 32; ++i)
    if ((lanes.live >> i & 1) && lanes.deposit[i][0]) found |= 1u << i;
  return found;
}

void fence() {
  acquire(&fence_tag);
  release(&fence_tag);
}

cudaError_t get_device(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t set_attribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  constexpr int kMost = 227 << 10;  // of an sm_90
  ++attributes;
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value > kMost) return cudaErrorInvalidValue;
    shared_limit[kernel] = value;
  }
  return cudaSuccess;
}

cudaError_t run(dim3 grid, dim3 block, size_t shared_bytes, Body run_body, void* argument,
                const void* kernel) {
  const size_t n = static_cast<size_t>(block.x) * block.y * block.z;
  last_error.clear();
  if (!n || n > kMaxThreads || block.z > 64) {
    last_error = "a block of " + std::to_string(n) + " threads";
    return cudaErrorInvalidConfiguration;
  }
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    last_error = "a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " +
                 std::to_string(grid.z) + " blocks";
    return cudaErrorInvalidConfiguration;
  }
  const auto limit = shared_limit.find(kernel);
  if (shared_bytes >
      (limit == shared_limit.end() ? 48u << 10 : static_cast<size_t>(limit->second))) {
    last_error = std::to_string(shared_bytes) + " bytes of shared memory, above the limit set";
    return cudaErrorInvalidValue;
  }
  while (fibers.size() < n) fibers.push_back(std::make_unique<Fiber>());
  fibers.resize(n);
  if (stacks_bytes < kFiberSets * n * kStack) {
    if (stacks) munmap(stacks, stacks_bytes);
    stacks_bytes = kFiberSets * n * kStack;
    stacks = static_cast<char*>(mmap(nullptr, stacks_bytes, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  body = run_body, body_argument = argument;
  blockDim = block, gridDim = grid;
#ifdef EMULATOR_TSAN
  tsan_main = __tsan_get_current_fiber();
#endif
  ++launches;
  std::mt19937 random(options.order);
  std::vector<uint64_t> order(static_cast<uint64_t>(grid.x) * grid.y * grid.z);
  for (size_t i = 0; i < order.size(); ++i)
    order[i] = options.order == 1 ? order.size() - 1 - i : i;
  if (options.order > 1) std::shuffle(order.begin(), order.end(), random);
  bool good = true;
  show_hidden(true);
  for (size_t i = 0; i < order.size() && good; ++i) {
    const uint64_t x = order[i];
    const uint3 index{static_cast<unsigned>(x % grid.x), static_cast<unsigned>(x / grid.x % grid.y),
                      static_cast<unsigned>(x / grid.x / grid.y)};
    good = run_block(index, block, shared_bytes, random);
  }
  show_hidden(false);
  acquire(&end_tag);
  return good ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace emulator
