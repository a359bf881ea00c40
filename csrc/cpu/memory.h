// Scratch memory of a call, and the mathematics that must not be compiled per instruction set.
#pragma once

#include <cstdint>

namespace attnkit {

constexpr int kMaxWorkers = 256;

void* allocate(int64_t bytes);  // 64-byte aligned; throws std::bad_alloc
void release(void* memory);
void yield();  // give up the processor while another worker finishes

}  // namespace attnkit
