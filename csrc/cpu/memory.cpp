#include "memory.h"

#include <cstdlib>
#include <new>
#include <thread>

namespace attnkit {

void* allocate(int64_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, bytes > 0 ? static_cast<size_t>(bytes) : 64))
    throw std::bad_alloc();
  return memory;
}

void release(void* memory) { std::free(memory); }

void yield() { std::this_thread::yield(); }

}  // namespace attnkit
