"""Sequences of different lengths: packed one after the other, or padded to the longest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import attnkit
from attnkit.benchmark import peers
from attnkit.benchmark.cases import OPERATIONS, Case, make_inputs
from attnkit.benchmark.numeric import Truth, truth
from attnkit.benchmark.suites.attention import Subject, prepare
from attnkit.benchmark.tasks import Suite, Work

PADDED = {"attnkit-padded": "attnkit", "torch": "torch", "naive": "naive"}
PACKED = ("attnkit", "torch-loop", "flash-attn")


@dataclass
class VarlenSubject(Subject):
    """A padded case, whose sequences are also laid one after the other.

    Rows of padding count for nothing: they are 0 in every result, and in the gradient of out.
    """

    @classmethod
    def of(cls, case: Case, seed: int = 0) -> VarlenSubject:
        """Draw the inputs."""
        inputs = make_inputs(case, seed)
        return cls(case, inputs._replace(dout=inputs.dout * cls._real(case)))

    @staticmethod
    def _real(case: Case) -> Tensor:
        """[B, 1, L, 1], 1 for tokens and 0 for padding."""
        lengths = torch.tensor(case.lengths(), device=case.device)
        inside = torch.arange(case.keys, device=case.device) < lengths[:, None]
        return inside[:, None, :, None].float()

    @cached_property
    def true(self) -> Truth:
        """The float64 results."""
        full, real = truth(self.case, self.inputs), self._real(self.case)
        tensors = tuple(
            (out * real[b], *gradients)
            for (b, _), (out, *gradients) in zip(full.pairs, full.tensors, strict=True)
        )
        return full._replace(tensors=tensors)

    def prepare(self, name: str, operation: str) -> Work:
        """See ``Contest``."""
        real = self._real(self.case).to(self.inputs.q.dtype)
        if name in PADDED:
            work = prepare(PADDED[name], operation, self.case, self.inputs)
            return Work(work.call, lambda: _without_padding(work.results(), real))
        lengths = self.case.lengths()
        q, k, v, dout = (_packed(x, lengths) for x in self.inputs[:4])
        attend = self._attend(name, lengths)
        if operation == "forward":

            def forward() -> Tensor:
                with torch.no_grad():
                    return attend(q, k, v)

            return Work(forward, lambda: (_padded(forward(), lengths, self.case.queries),))
        leaves = [x.requires_grad_() for x in (q, k, v)]

        def step() -> tuple[Tensor, ...]:
            out = attend(q, k, v)
            return out.detach(), *torch.autograd.grad(out, leaves, dout)

        return Work(step, lambda: tuple(_padded(x, lengths, self.case.queries) for x in step()))

    def ran(self, name: str) -> str:
        """See ``Contest``."""
        return super().ran("attnkit") if name.startswith("attnkit") else name

    def _attend(self, name: str, lengths: Sequence[int]) -> Callable[..., Any]:
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(self.case.device)
        causal, grouped = "causal" in self.case.terms, self.case.heads != self.case.kv_heads
        if name == "attnkit":
            longest = max(lengths)
            return lambda q, k, v: attnkit.varlen_attention(
                q, k, v, ends, ends, longest, longest, causal=causal
            )
        if name == "flash-attn":
            from flash_attn import flash_attn_varlen_func

            longest = max(lengths)
            return lambda q, k, v: flash_attn_varlen_func(
                q, k, v, ends, ends, longest, longest, causal=causal
            )

        def loop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = (x.transpose(0, 1)[None].split(list(lengths), 2) for x in (q, k, v))
            outs = [
                F.scaled_dot_product_attention(*one, is_causal=causal, enable_gqa=grouped)  # type: ignore[misc]
                for one in zip(*parts, strict=True)
            ]
            return torch.cat(outs, 2)[0].transpose(0, 1)

        return loop


def _packed(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """[B, H, L, D] to [T, H, D], without the padding."""
    return torch.cat([x[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)]).contiguous()


def _padded(x: Tensor, lengths: Sequence[int], longest: int) -> Tensor:
    """[T, H, D] to [B, H, L, D], with zeros for padding."""
    out = x.new_zeros(len(lengths), x.shape[1], longest, x.shape[2])
    for b, part in enumerate(x.detach().split(list(lengths))):
        out[b, :, : len(part)] = part.transpose(0, 1)
    return out


def _without_padding(results: Sequence[Tensor], real: Tensor) -> tuple[Tensor, ...]:
    """The output with zeros for padding; gradients have them already."""
    return results[0] * real, *results[1:]


def _names(operation: str) -> tuple[str, ...]:
    return (*PACKED, *PADDED)


def _refusal(name: str, case: Case, operation: str) -> str | None:
    if name not in _names(operation):
        raise ValueError(
            f"implementation is {name!r}, expected one of {', '.join(_names(operation))}"
        )
    if case.structure not in ({"padded"}, {"padded", "causal"}) or case.features:
        return "a case of varlen is padded, or padded+causal"
    if case.queries != case.keys:
        return "a case of varlen has as many queries as keys"
    return peers.PEERS[name].refuses(_square(case), operation) if name in peers.PEERS else None


def _square(case: Case) -> Case:
    """The case without its padding, which a packed call has not."""
    mask = "causal" if "causal" in case.terms else "full"
    return Case(case.batch, case.heads, case.queries, case.head_dim, case.dtype, mask,
                kv_heads=case.kv_heads, value_dim=case.value_dim, device=case.device)  # fmt: skip


def _flops(case: Case, operation: str) -> float:
    """Of the tokens alone: queries of padding are no work that anybody wants."""
    pairs = sum(n * n for n in case.lengths()) / (2 if "causal" in case.terms else 1)
    return OPERATIONS[operation] * case.heads * pairs * 2 * (case.head_dim + case.value_dim)


SUITES = {
    "varlen": Suite(
        "sequences of different lengths, packed or padded",
        ("forward", "step"),
        _names,
        _refusal,
        VarlenSubject.of,
        _flops,
        "flops",
        memory=True,
    ),
}
