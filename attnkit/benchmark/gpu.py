"""Times and peaks of a GPU: events on the stream, a cold cache before each call, the allocator.

Written for CUDA (and HIP) devices; on a machine without one nothing here runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

FLUSH_BYTES = 256 << 20  # several times the second-level cache of any GPU
MATRIX = 8192  # side of the matrices whose product is the yardstick
COPY_BYTES = 1 << 30


class Stopwatch:
    """Seconds of a call between two events, with nothing of its inputs left in the cache."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self._device)

    def __call__(self, call: Callable[[], object]) -> float:
        """Time one call."""
        stream = torch.cuda.current_stream(self._device)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        before.record(stream)
        call()
        after.record(stream)
        after.synchronize()
        return before.elapsed_time(after) * 1e-3


def peak_growth(call: Callable[[], object], device: str) -> int:
    """Bytes by which allocated memory grew at the peak of ``call``."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = call()
    torch.cuda.synchronize(device)
    growth = torch.cuda.max_memory_allocated(device) - before
    del kept  # alive until the peak was read
    return max(0, growth)


def product(device: str, dtype: torch.dtype) -> tuple[float, Callable[[], object]]:
    """Floating-point operations of a large matrix product in ``dtype``, and the product."""
    a, b = (torch.randn(MATRIX, MATRIX, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * MATRIX**3, lambda: torch.mm(a, b, out=out)


def copy(device: str) -> tuple[float, Callable[[], object]]:
    """Bytes read and written by a copy on the device, and the copy."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * COPY_BYTES, lambda: target.copy_(source)
