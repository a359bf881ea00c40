// What the emulator tells AddressSanitizer and ThreadSanitizer.  Its own files are compiled without
// either (its state is not the subject), with EMULATOR_ASAN or EMULATOR_TSAN where the kernels have
// them: every access that it makes for a kernel is announced here.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef EMULATOR_TSAN
extern "C" {
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void* __tsan_get_current_fiber(void);
void __tsan_acquire(void*);
void __tsan_release(void*);
void __tsan_read_range(void*, unsigned long);
void __tsan_write_range(void*, unsigned long);
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
#endif
#ifdef EMULATOR_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
extern "C" {
void __asan_loadN(void*, size_t);
void __asan_storeN(void*, size_t);
}
#endif

namespace emulator {

// A kernel's thread reads or writes n bytes.
inline void note_read([[maybe_unused]] const void* p, [[maybe_unused]] size_t n) {
#ifdef EMULATOR_TSAN
  if (n) __tsan_read_range(const_cast<void*>(p), n);
#elif defined(EMULATOR_ASAN)
  if (n) __asan_loadN(const_cast<void*>(p), n);
#endif
}
inline void note_write([[maybe_unused]] void* p, [[maybe_unused]] size_t n) {
#ifdef EMULATOR_TSAN
  if (n) __tsan_write_range(p, n);
#elif defined(EMULATOR_ASAN)
  if (n) __asan_storeN(p, n);
#endif
}

// What happened before a release happens before what follows an acquire of the same tag.
inline void release([[maybe_unused]] void* tag) {
#ifdef EMULATOR_TSAN
  __tsan_release(tag);
#endif
}
inline void acquire([[maybe_unused]] void* tag) {
#ifdef EMULATOR_TSAN
  __tsan_acquire(tag);
#endif
}

inline void forbid([[maybe_unused]] void* p, [[maybe_unused]] size_t n) {
#ifdef EMULATOR_ASAN
  __asan_poison_memory_region(p, n);
#endif
}
inline void allow([[maybe_unused]] void* p, [[maybe_unused]] size_t n) {
#ifdef EMULATOR_ASAN
  __asan_unpoison_memory_region(p, n);
#endif
}

// While it lives, the allocator's and libc's accesses on this thread are not looked at.
struct Unwatched {
#ifdef EMULATOR_TSAN
  Unwatched() {
    AnnotateIgnoreReadsBegin("", 0);
    AnnotateIgnoreWritesBegin("", 0);
  }
  ~Unwatched() {
    AnnotateIgnoreWritesEnd("", 0);
    AnnotateIgnoreReadsEnd("", 0);
  }
#else
  Unwatched() {}
  ~Unwatched() {}
#endif
};

}  // namespace emulator
