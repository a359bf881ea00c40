"""Forward, backward, both together; and what each feature of a call costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attnkit.benchmark.cases import OPERATIONS, Case, Inputs, make_inputs
from attnkit.benchmark.implementations import (
    IMPLEMENTATIONS,
    implementation,
    ran,
    refusal,
)
from attnkit.benchmark.numeric import TOLERANCE, Truth, check, truth
from attnkit.benchmark.tasks import Suite, Work

PLAIN = "attnkit-plain"  # the same call without mask and features, in the suite of masks


@dataclass
class Subject:
    """A case with its inputs and, when first asked for, its truth."""

    case: Case
    inputs: Inputs

    @classmethod
    def of(cls, case: Case, seed: int = 0) -> Subject:
        """Draw the inputs."""
        return cls(case, make_inputs(case, seed))

    @cached_property
    def true(self) -> Truth:
        """The float64 results."""
        return truth(self.case, self.inputs)

    def prepare(self, name: str, operation: str) -> Work:
        """See ``Contest``."""
        return prepare(name, operation, self.case, self.inputs)

    def check(self, name: str, operation: str, results: Sequence[Tensor]) -> dict[str, float]:
        """See ``Contest``."""
        what = f"{name} {operation} on {self.case.label}"
        return check(what, results, self.true, TOLERANCE[self.case.dtype])

    def ran(self, name: str) -> str:
        """See ``Contest``."""
        return ran(name, self.case, self.inputs)


def prepare(name: str, operation: str, case: Case, inputs: Inputs) -> Work:
    """``forward`` without gradients, ``backward`` alone (the graph is built here), or ``step``."""
    if operation not in OPERATIONS:
        raise ValueError(f"operation is {operation!r}, expected one of {', '.join(OPERATIONS)}")
    if operation == "forward":
        attend = implementation(name, case, inputs)

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(*inputs[:3])

        return Work(forward, lambda: (forward(),))

    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    q, k, v = leaves
    if "learned-bias" in case.terms and inputs.bias is not None:
        bias = inputs.bias.detach().requires_grad_()
        inputs = inputs._replace(bias=bias)
        leaves.append(bias)
    attend = implementation(name, case, inputs)

    def gradients(out: Tensor, keep: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, inputs.dout, retain_graph=keep)

    def step() -> tuple[Tensor, ...]:
        out = attend(q, k, v)
        return out.detach(), *gradients(out, keep=False)

    if operation == "step":
        return Work(step, step)
    out = attend(q, k, v)

    def backward() -> tuple[Tensor, ...]:
        return gradients(out, keep=True)

    return Work(backward, lambda: (out.detach(), *backward()))


@dataclass
class FeatureSubject(Subject):
    """A case beside the same case without mask and features."""

    @cached_property
    def plain(self) -> Subject:
        """Nothing but q, k, v of the same numbers."""
        inputs = Inputs(*self.inputs[:4])
        return Subject(replace(self.case, mask="full"), inputs)

    def prepare(self, name: str, operation: str) -> Work:
        """See ``Contest``."""
        if name == PLAIN:
            return self.plain.prepare("attnkit", operation)
        return super().prepare(name, operation)

    def check(self, name: str, operation: str, results: Sequence[Tensor]) -> dict[str, float]:
        """See ``Contest``."""
        if name == PLAIN:
            return self.plain.check("attnkit", operation, results)
        return super().check(name, operation, results)

    def ran(self, name: str) -> str:
        """See ``Contest``."""
        return self.plain.ran("attnkit") if name == PLAIN else super().ran(name)


def _names(operation: str) -> tuple[str, ...]:
    return tuple(IMPLEMENTATIONS)


def _feature_refusal(name: str, case: Case, operation: str) -> str | None:
    return None if name == PLAIN else refusal(name, case, operation)


def _flops(case: Case, operation: str) -> float:
    return case.flops(operation)


SUITES = {
    operation: Suite(summary, (operation,), _names, refusal, Subject.of, _flops, "flops", True)
    for operation, summary in {
        "forward": "the forward pass, without gradients",
        "backward": "the backward pass alone",
        "step": "forward and backward together, as in training",
    }.items()
} | {
    "masks": Suite(
        "what each mask and feature costs beside the plain call",
        ("forward", "backward", "step"),
        lambda operation: ("attnkit", PLAIN, *_names(operation)[1:]),
        _feature_refusal,
        FeatureSubject.of,
        _flops,
        "flops",
        memory=True,
    ),
}
