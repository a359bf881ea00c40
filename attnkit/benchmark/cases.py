"""What is measured: the shapes, and the implementations that are compared on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import attnkit
from attnkit import masks

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
MASKS = ("full", "causal", "padded")

# Work of each operation, as a multiple of the forward pass's: the backward computes five matrix
# products where the forward computes two (it recomputes the scores).
OPERATIONS = {"forward": 1.0, "backward": 2.5, "step": 3.5}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One attention problem: q [batch, heads, queries, head_dim], k, v [batch, kv_heads, keys, .].

    ``mask`` is ``full``, ``causal`` (top-left) or ``padded`` (lengths from 25% to 100% of the
    keys, evenly over the batch).  What is left out follows the rest: ``keys`` is ``queries``,
    ``kv_heads`` is ``heads``, ``value_dim`` is ``head_dim``.
    """

    batch: int
    heads: int
    queries: int
    head_dim: int
    dtype: str = "fp32"
    mask: str = "full"
    keys: int = 0
    kv_heads: int = 0
    value_dim: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        if self.mask not in MASKS:
            raise ValueError(f"mask is {self.mask!r}, expected one of {', '.join(MASKS)}")
        set_once = object.__setattr__  # the dataclass is frozen
        set_once(self, "keys", self.keys or self.queries)
        set_once(self, "kv_heads", self.kv_heads or self.heads)
        set_once(self, "value_dim", self.value_dim or self.head_dim)
        for name in ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads is {self.heads}, expected a multiple of kv_heads, {self.kv_heads}"
            )

    @property
    def shape(self) -> dict[str, int]:
        """The sizes by name, as results store them."""
        names = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim")
        return {name: getattr(self, name) for name in names}

    @property
    def label(self) -> str:
        """``B1 H8 L1024 D64 fp32 causal``."""

        def both(first: int, second: int, between: str) -> str:
            return f"{first}" if first == second else f"{first}{between}{second}"

        heads = both(self.heads, self.kv_heads, "/")
        length = both(self.queries, self.keys, "x")
        dim = both(self.head_dim, self.value_dim, "/")
        return f"B{self.batch} H{heads} L{length} D{dim} {self.dtype} {self.mask}"

    def lengths(self) -> list[int]:
        """Visible keys of each sequence of the batch, as far as padding goes."""
        if self.mask != "padded":
            return [self.keys] * self.batch
        steps = torch.linspace(0.25, 1.0, self.batch, dtype=torch.float64)
        return [max(1, round(self.keys * share)) for share in steps.tolist()]

    def visible_pairs(self) -> float:
        """(query, key) pairs that one head has to look at, over the batch."""
        if self.mask == "causal" and self.queries == self.keys:
            return self.batch * self.queries * self.keys / 2  # the convention of the field
        if self.mask == "causal":
            return self.batch * float(sum(min(i + 1, self.keys) for i in range(self.queries)))
        return float(self.queries * sum(self.lengths()))

    def flops(self, operation: str) -> float:
        """``4 B H Lq Lk D`` forward, 2.5 times that backward, 3.5 a step; half if causal."""
        per_pair = 2 * (self.head_dim + self.value_dim)
        return OPERATIONS[operation] * self.heads * self.visible_pairs() * per_pair

    def tensor_bytes(self) -> int:
        """Bytes of q, k, v and the output together."""
        q_and_out = self.batch * self.heads * self.queries * (self.head_dim + self.value_dim)
        k_and_v = self.batch * self.kv_heads * self.keys * (self.head_dim + self.value_dim)
        return (q_and_out + k_and_v) * DTYPES[self.dtype].itemsize


class Inputs(NamedTuple):
    """The tensors of a case, without gradients."""

    q: Tensor  # [B, Hq, Lq, D]
    k: Tensor  # [B, Hkv, Lk, D]
    v: Tensor  # [B, Hkv, Lk, Dv]
    dout: Tensor  # [B, Hq, Lq, Dv]
    lengths: Tensor | None  # [B] int32, for padded cases


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Normal random numbers, the same for the same seed on every machine."""
    draw = torch.Generator().manual_seed(seed)

    def normal(heads: int, length: int, dim: int) -> Tensor:
        values = torch.randn(case.batch, heads, length, dim, generator=draw)
        return values.to(case.device, DTYPES[case.dtype])

    lengths = None
    if case.mask == "padded":
        lengths = torch.tensor(case.lengths(), dtype=torch.int32, device=case.device)
    return Inputs(
        q=normal(case.heads, case.queries, case.head_dim),
        k=normal(case.kv_heads, case.keys, case.head_dim),
        v=normal(case.kv_heads, case.keys, case.value_dim),
        dout=normal(case.heads, case.queries, case.value_dim),
        lengths=lengths,
    )


def ours(case: Case, inputs: Inputs) -> Attention:
    """attnkit: the drop-in function where it can say the mask, else the full call."""
    if case.mask != "padded":
        causal = case.mask == "causal"
        grouped = case.kv_heads != case.heads

        def drop_in(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attnkit.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=grouped
            )

        return drop_in
    mask = _mask(case, inputs)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnkit.attention(q, k, v, mask=mask)

    return attend


def torch_sdpa(case: Case, inputs: Inputs) -> Attention:
    """PyTorch's own fused function; padding as a boolean mask, built once."""
    keep = _keep(case, inputs)
    causal = case.mask == "causal"
    grouped = case.kv_heads != case.heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=keep, is_causal=causal, enable_gqa=grouped
        )

    return attend


def naive(case: Case, inputs: Inputs) -> Attention:
    """softmax(q k^T / sqrt(D) + mask) v, line by line; the mask is built once."""
    hidden = None
    if case.mask == "causal":
        ones = torch.ones(case.queries, case.keys, dtype=torch.bool, device=case.device)
        hidden = ones.triu(1)  # [Lq, Lk]
    keep = _keep(case, inputs)
    if keep is not None:
        hidden = ~keep
    group = case.heads // case.kv_heads
    scale = case.head_dim**-0.5

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(-2, -1) * scale  # [B, Hq, Lq, Lk]
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        return scores.softmax(-1) @ v

    return attend


def _mask(case: Case, inputs: Inputs) -> masks.Mask | None:
    if inputs.lengths is not None:
        return masks.padding(inputs.lengths)
    return masks.causal() if case.mask == "causal" else None


def _keep(case: Case, inputs: Inputs) -> Tensor | None:
    """[B, 1, 1, Lk] bool, True = attend, for a padded case."""
    if inputs.lengths is None:
        return None
    keys = torch.arange(case.keys, device=case.device)
    return (keys < inputs.lengths[:, None])[:, None, None]


IMPLEMENTATIONS: dict[str, Callable[[Case, Inputs], Attention]] = {
    "attnkit": ours,
    "torch": torch_sdpa,
    "naive": naive,
}


def implementation(name: str, case: Case, inputs: Inputs) -> Attention:
    """The function (q, k, v) -> out of an implementation on a case.

    ``attnkit:reference`` (or another backend's name after the colon) forces that backend.
    """
    family, _, backend = name.partition(":")
    if family not in IMPLEMENTATIONS or (backend and family != "attnkit"):
        known = ", ".join([*IMPLEMENTATIONS, "attnkit:<backend>"])
        raise ValueError(f"implementation is {name!r}, expected one of {known}")
    attend = IMPLEMENTATIONS[family](case, inputs)
    if not backend:
        return attend

    def forced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with attnkit.use_backend(backend):
            return attend(q, k, v)

    return forced


def ran(name: str, case: Case, inputs: Inputs) -> str:
    """The backend that serves an implementation on a case: ``cpu``, ``reference``, ``torch``..."""
    family, _, backend = name.partition(":")
    if family != "attnkit" or backend:
        return backend or family
    chosen = attnkit.explain(*inputs[:3], mask=_mask(case, inputs)).chosen
    if chosen is None:
        raise NotImplementedError(f"no backend serves {case.label}")
    return chosen


class Work(NamedTuple):
    """An operation of one implementation, ready to be timed or checked."""

    call: Callable[[], object]
    results: Callable[[], tuple[Tensor, ...]]  # (out,) or (out, dq, dk, dv)


def prepare(name: str, operation: str, case: Case, inputs: Inputs) -> Work:
    """``forward`` without gradients, ``backward`` alone (the graph is built here), or ``step``."""
    if operation not in OPERATIONS:
        raise ValueError(f"operation is {operation!r}, expected one of {', '.join(OPERATIONS)}")
    attend = implementation(name, case, inputs)
    if operation == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(*inputs[:3])

        return Work(forward, lambda: (forward(),))

    leaves = tuple(x.detach().requires_grad_() for x in inputs[:3])

    def gradients(out: Tensor, keep: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, inputs.dout, retain_graph=keep)

    def step() -> tuple[Tensor, ...]:
        out = attend(*leaves)
        return out.detach(), *gradients(out, keep=False)

    if operation == "step":
        return Work(step, step)
    out = attend(*leaves)

    def backward() -> tuple[Tensor, ...]:
        return gradients(out, keep=True)

    return Work(backward, lambda: (out.detach(), *backward()))
