// Fibers: stacks, and how to get from one to another.
#pragma once

extern "C" void emulator_switch(void** save, void* to);
void* emulator_prepare(char* top, void (*entry)());
