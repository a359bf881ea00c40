// What the parts of the emulator know of the block that is running.
#pragma once

#include <string>
#include <vector>

#include "runtime.h"

namespace emulator {

enum class State { kReady, kAtBarrier, kInWarp, kDone };

struct Copy {  // one cp.async under way
  unsigned char data[16];
  void* to;
  unsigned bytes;
};

struct Fiber {
  unsigned index;  // of the thread in its block
  uint3 thread;
  State state;
  void* stack_pointer;
  char* stack;
  Place waits_at;
  void* tsan = nullptr;  // its fiber there
  void* fake_stack = nullptr;
  std::vector<std::vector<Copy>> committed;
  std::vector<Copy> open;
};

Fiber& self();
void wait_as(State state, Place place);  // until someone makes the fiber ready again

// The running block's dynamic shared memory.
struct Shared {
  char* memory = nullptr;
  size_t launched = 0;  // bytes that the launch asked for
  size_t room = 0;      // bytes with what red zones need
};
extern Shared shared;
void new_shared_memory(size_t launched);
void free_shared_memory();
void show_hidden(bool shown);            // to a kernel that is about to run
void* barrier_tag(unsigned generation);  // a new address for every block: none orders two blocks

}  // namespace emulator
