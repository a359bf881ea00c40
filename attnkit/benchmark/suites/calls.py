"""What a call costs when there is next to nothing to compute."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from attnkit.benchmark.implementations import implementation, refusal
from attnkit.benchmark.suites.attention import Subject
from attnkit.benchmark.tasks import Suite, Work

NAMES = ("attnkit", "torch")


@dataclass
class CallSubject(Subject):
    """Tensors so small that the way to the kernel is all there is."""

    def prepare(self, name: str, operation: str) -> Work:
        """See ``Contest``; no context manager, since one takes a microsecond itself."""
        attend = implementation(name, self.case, self.inputs)
        recorded = operation == "call with gradient"
        tensors = [x.detach().requires_grad_(recorded) for x in self.inputs[:3]]
        call = partial(attend, *tensors)
        return Work(call, lambda: (call().detach(),))


SUITES = {
    "overhead": Suite(
        "microseconds of a call on next to nothing, without and with a gradient to come",
        ("call", "call with gradient"),
        lambda operation: NAMES,
        lambda name, case, operation: refusal(name, case, "forward"),
        CallSubject.of,
        lambda case, operation: case.flops("forward"),
        "none",
    ),
}
