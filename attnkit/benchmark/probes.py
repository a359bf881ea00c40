"""What the machine can do at most: fused multiply-adds per second, bytes read per second.

A probe is a candidate like any other, timed in the same rounds as the kernels whose share of the
peak one wants to know: a peak from another minute, or from a data sheet, belongs to another clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attnkit.benchmark.timing import Candidate, Samples

PROBE = "peak"  # the name of the candidate, in comparisons and results
# Of each thread in a call, 4 to 30 ms: long against the start of the threads, short against a
# round.  A fixed number, since a trial run on a busy machine says little.
PROBE_FLOPS = 1e9
FALLBACK_SIZE = 1024  # of the square matrices; beyond it the rate no longer grows
BYTES = ("read", "sum", "copy")  # the kinds of probe whose work is bytes
READ_BYTES = 256 << 20  # several times the last-level cache of a large server


@dataclass(frozen=True)
class Probe:
    """Work whose amount is known.

    ``kind`` says what ran: ``fma`` or ``read`` are loops in attnkit's extension that do nothing
    else; ``matmul`` and ``sum`` are PyTorch's operations, used without the extension and on a GPU,
    as is ``copy``, and stay below the machine's peak.
    """

    kind: str
    work: float  # floating-point operations, or bytes, of one call
    call: Callable[[], object]
    stopwatch: Callable[[Callable[[], object]], float] | None = None

    def candidate(self, name: str = PROBE) -> Candidate:
        """The probe as a candidate of ``compare``."""
        return Candidate(name, self.call, stopwatch=self.stopwatch)


@dataclass(frozen=True)
class Peak:
    """A rate that was measured, in work per second."""

    kind: str
    median: float
    best: float

    @property
    def unit(self) -> str:
        """``FLOP/s`` or ``B/s``."""
        return "B/s" if self.kind in BYTES else "FLOP/s"

    @classmethod
    def of(cls, probe: Probe, samples: Samples) -> Peak:
        """From the samples of ``probe.candidate()``."""
        return cls(probe.kind, probe.work / samples.median, probe.work / samples.best)


def flops_probe(flops: float = PROBE_FLOPS) -> Probe:
    """The fp32 multiply-add peak of all of PyTorch's threads; each does about ``flops`` in a call.

    It is the yardstick for every dtype: where the processor has faster instructions for 16-bit
    types, a kernel that uses them may exceed it.
    """
    operator = _operator("cpu_probe_fma")
    if operator is None:
        a, b = torch.rand(2, FALLBACK_SIZE, FALLBACK_SIZE)
        out = torch.empty_like(a)
        return Probe("matmul", 2.0 * FALLBACK_SIZE**3, lambda: torch.mm(a, b, out=out))
    iterations = max(1, round(flops * torch.get_num_threads() / operator(1)))
    return Probe("fma", float(operator(iterations)), lambda: operator(iterations))


def read_probe(size: int = READ_BYTES) -> Probe:
    """The rate at which all of PyTorch's threads read ``size`` bytes that no cache holds."""
    data = torch.ones(size // 4)
    operator = _operator("cpu_probe_read")
    if operator is None:
        return Probe("sum", float(data.nbytes), data.sum)
    return Probe("read", float(data.nbytes), lambda: operator(data))


def _operator(name: str) -> Callable[..., Any] | None:
    """An operator of attnkit's extension, or None where it was not built."""
    found: Callable[..., Any] | None = getattr(torch.ops.attnkit, name, None)
    return found
