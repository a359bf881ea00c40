"""Is the result right?  Asked of every implementation before it is timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import attnkit
from attnkit.benchmark.cases import Case, Inputs
from attnkit.benchmark.implementations import ours

# Largest error of a row against float64, relative to the row's norm: several times what right
# kernels show on normal inputs, so that a kernel with a fault is told from a merely less exact one.
TOLERANCE = {"fp64": 1e-11, "fp32": 2e-5, "fp16": 1e-2, "bf16": 6e-2}

NAMES = ("out", "dq", "dk", "dv", "dbias")
FLOP_BUDGET = 3e10  # of the check; a large case is checked on some of its heads


class WrongResult(AssertionError):
    """An implementation's numbers are not attention's numbers, so its speed means nothing."""


class Truth(NamedTuple):
    """Float64 results of the (batch, kv head) pairs that are checked.

    ``tensors[n]`` holds out, dq, dk, dv of pair n, [group or 1, L, dim], and after these the
    gradient of a learned bias, [group, Lq, Lk].
    """

    pairs: tuple[tuple[int, int], ...]
    group: int  # query heads of one kv head
    tensors: tuple[tuple[Tensor, ...], ...]


def truth(case: Case, inputs: Inputs, budget: float = FLOP_BUDGET) -> Truth:
    """Output and gradients in float64 by the reference backend, one kv head at a time."""
    group = case.heads // case.kv_heads
    every = [(b, h) for b in range(case.batch) for h in range(case.kv_heads)]
    pairs = _spread(every, int(budget / (case.flops("step") / len(every))))
    if "dropout" in case.terms:
        pairs = ((0, 0),)  # what is dropped depends on the place in the batch and among the heads
    return Truth(pairs, group, tuple(_one_head(case, inputs, b, h, group) for b, h in pairs))


def _one_head(case: Case, inputs: Inputs, b: int, h: int, group: int) -> tuple[Tensor, ...]:
    heads, kv_head, row = slice(h * group, (h + 1) * group), slice(h, h + 1), slice(b, b + 1)
    bias = None if inputs.bias is None else inputs.bias[:, heads].double()
    one = inputs._replace(
        q=inputs.q[row, heads].double().requires_grad_(),  # [1, group, Lq, D]
        k=inputs.k[row, kv_head].double().requires_grad_(),  # [1, 1, Lk, D]
        v=inputs.v[row, kv_head].double().requires_grad_(),
        dout=inputs.dout[row, heads].double(),
        lengths=None if inputs.lengths is None else inputs.lengths[row],
        keep=None if inputs.keep is None else inputs.keep[row],
        bias=bias,
        alibi=None if inputs.alibi is None else inputs.alibi[heads],
        sinks=None if inputs.sinks is None else inputs.sinks[heads],
    )
    leaves = [one.q, one.k, one.v]
    if bias is not None and "learned-bias" in case.terms:
        leaves.append(bias.requires_grad_())
    with attnkit.use_backend("reference"):
        out = ours(case, one)(one.q, one.k, one.v)
        gradients = torch.autograd.grad(out, leaves, one.dout)
    return out.detach()[0], *(gradient[0] for gradient in gradients)


def _spread(items: Sequence[tuple[int, int]], most: int) -> tuple[tuple[int, int], ...]:
    """At most ``most`` (but two) of the items, evenly, the first and the last among them."""
    count = min(len(items), max(2, most))
    if count <= 1:
        return tuple(items)
    return tuple(items[i * (len(items) - 1) // (count - 1)] for i in range(count))


def row_error(found: Tensor, expected: Tensor) -> float:
    """max over rows of |found - expected| / max(|expected|, typical |expected|), Euclidean norms.

    A row whose true value is near zero is measured against the typical (root mean square) row.
    NaN where there is one.
    """
    expected = expected.double()
    norms = expected.norm(dim=-1)
    typical = norms.square().mean().sqrt()
    scale = norms.clamp(min=float(typical)).clamp(min=torch.finfo(torch.float64).tiny)
    return float(((found.double() - expected).norm(dim=-1) / scale).max())


def errors(results: Sequence[Tensor], true: Truth) -> dict[str, float]:
    """The largest row error of each result, by name: out and, where given, the gradients."""
    seen: dict[str, list[float]] = {name: [] for name in NAMES[: len(results)]}
    for (b, h), tensors in zip(true.pairs, true.tensors, strict=True):
        for name, found, expected in zip(NAMES, results, tensors, strict=False):
            heads = expected.shape[0]
            seen[name].append(row_error(found[b, h * heads : (h + 1) * heads], expected))
    # torch's maximum is NaN when one of the numbers is; Python's depends on their order
    return {name: float(torch.tensor(values).max()) for name, values in seen.items()}


def check(name: str, results: Sequence[Tensor], true: Truth, tolerance: float) -> dict[str, float]:
    """The errors of ``errors``; raises WrongResult if one is above the tolerance."""
    return _within(name, errors(results, true), tolerance)


def check_tensors(
    name: str, pairs: Mapping[str, tuple[Tensor, Tensor]], tolerance: float
) -> dict[str, float]:
    """``check`` for tensors of any shape, each (found, expected): the largest row error by name."""
    found = {what: row_error(one.cpu(), other) for what, (one, other) in pairs.items()}
    return _within(name, found, tolerance)


def _within(name: str, found: dict[str, float], tolerance: float) -> dict[str, float]:
    for tensor, error in found.items():
        if not error <= tolerance:  # a NaN is not
            raise WrongResult(
                f"{name}: {tensor} has a row error of {error:.3g} against float64, expected at "
                f"most {tolerance:.3g}; it is not timed"
            )
    return found
