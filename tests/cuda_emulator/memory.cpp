// Shared memory and asynchronous copies.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "sanitizers.h"
#include "scheduler.h"

namespace emulator {

Shared shared;

namespace {
constexpr size_t kRedZone = 64, kMaxArrays = 24;

size_t up(size_t x, size_t to) { return (x + to - 1) / to * to; }

std::vector<std::pair<void*, size_t>> hidden;
}  // namespace

void hide(void* p, size_t bytes) {
  hidden.emplace_back(p, bytes);
  mprotect(p, bytes, PROT_NONE);
}

void show_hidden(bool shown) {
  for (const auto& [p, bytes] : hidden)
    mprotect(p, bytes, shown ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void new_shared_memory(size_t launched) {
  shared.launched = launched;
  shared.room = up(launched + kMaxArrays * (kRedZone + 128), 128);
  shared.memory = static_cast<char*>(aligned_alloc(128, shared.room + 128));
  memset(shared.memory, 0xff, shared.room);  // NaN in every floating-point type
}

void free_shared_memory() {
  allow(shared.memory, shared.room);
  free(shared.memory);
}

void* barrier_tag(unsigned generation) { return shared.memory + shared.room + generation % 2; }

void* take_shared(Carving& carving, size_t bytes, size_t align, Place place) {
  if (align < 16) align = 16;
  carving.device = up(carving.device, align);
  carving.host = up(carving.host, align);
  if (carving.device + bytes > shared.launched)
    fail("shared memory: " + std::to_string(carving.device + bytes) + " bytes are carved, " +
             std::to_string(shared.launched) + " were launched",
         place);
  char* p = shared.memory + carving.host;
  carving.device += bytes;
  carving.host += bytes;
  if (carving.host + kRedZone + align > shared.room) fail("too many shared arrays", place);
  forbid(shared.memory + carving.host, kRedZone);
#ifdef EMULATOR_ASAN
  carving.host += kRedZone;
#endif
  return p;
}

// The destination is NaN until the copy has been waited for.
void copy_async(void* to, const void* from, size_t bytes, size_t zeros, Place place) {
  if (bytes != 4 && bytes != 8 && bytes != 16)
    fail("cp.async of " + std::to_string(bytes) + " bytes", place);
  if (zeros > bytes) fail("cp.async fills more than it copies", place);
  const auto aligned = [&](const void* p) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; };
  if (!aligned(to) || !aligned(from))
    fail("cp.async: an address is not aligned to its size", place);
  char* target = static_cast<char*>(to);
  if (target < shared.memory || target + bytes > shared.memory + shared.room)
    fail("cp.async: the destination is not shared memory", place);
  note_read(from, bytes - zeros);
  note_write(to, bytes);
  const Unwatched unwatched;
  Copy copy{{}, to, static_cast<unsigned>(bytes)};
  __builtin_memcpy(copy.data, from, bytes - zeros);
  memset(to, 0xff, bytes);
  self().open.push_back(copy);
}

void commit_copies() {
  const Unwatched unwatched;
  Fiber& f = self();
  f.committed.push_back(std::move(f.open));
  f.open.clear();
}

void wait_for_copies(unsigned groups_left) {
  auto& waiting = self().committed;
  while (waiting.size() > groups_left) {
    for (const Copy& copy : waiting.front()) {
      note_write(copy.to, copy.bytes);
      const Unwatched unwatched;
      memcpy(copy.to, copy.data, copy.bytes);
    }
    const Unwatched unwatched;
    waiting.erase(waiting.begin());
  }
}

}  // namespace emulator
