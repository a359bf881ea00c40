// emulator_switch(save, to): push what a call must preserve, leave the stack pointer in *save, go
// on from the one in `to`.  emulator_prepare lays out a stack that starts in `entry`.
#include "context_switch.h"

#include <cstring>

#if defined(__x86_64__)
asm(R"(
  .text
  .globl emulator_switch
  .type emulator_switch,@function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size emulator_switch,.-emulator_switch
  .section .note.GNU-stack,"",@progbits
  .text
)");

void* emulator_prepare(char* top, void (*entry)()) {
  void** stack = reinterpret_cast<void**>(top);
  *--stack = nullptr;  // where `entry` would return to, and 16-byte alignment as after a call
  *--stack = reinterpret_cast<void*>(entry);
  stack -= 6;
  memset(stack, 0, 6 * sizeof(void*));
  return stack;
}
#elif defined(__aarch64__)
asm(R"(
  .text
  .globl emulator_switch
  .type emulator_switch,%function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size emulator_switch,.-emulator_switch
)");

void* emulator_prepare(char* top, void (*entry)()) {
  void** stack = reinterpret_cast<void**>(top) - 20;
  memset(stack, 0, 20 * sizeof(void*));
  stack[11] = reinterpret_cast<void*>(entry);  // x30
  return stack;
}
#else
#error "the emulator switches stacks on x86-64 and AArch64 only"
#endif
