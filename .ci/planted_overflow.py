"""Under AddressSanitizer a key row that must not be touched has to stop the kernel reading it."""

import ctypes

import torch

import attnkit

query, key, value = torch.randn(1, 1, 8, 32), torch.randn(1, 1, 64, 32), torch.randn(1, 1, 64, 32)
last_row = ctypes.c_void_p(key.data_ptr() + 63 * 32 * 4)
ctypes.CDLL(None).__asan_poison_memory_region(last_row, ctypes.c_size_t(32 * 4))
with attnkit.use_backend("cpu"):
    attnkit.attention(query, key, value)
print("not seen")
