"""What is measured: sizes, dtype and mask of a problem, and its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnkit import masks

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

# Work of each operation, as a multiple of the forward pass's: the backward computes five matrix
# products where the forward computes two (it recomputes the scores).
OPERATIONS = {"forward": 1.0, "backward": 2.5, "step": 3.5}

# What a mask is made of, joined by "+", with a number after ":" where there is one (its default)
STRUCTURE = {
    "full": None,  # every key
    "causal": None,  # keys j <= i
    "padded": None,  # lengths from 25% to 100% of the keys, evenly over the batch
    "scattered": None,  # three quarters of the keys, at random, for each sequence
    "window": 256,  # keys nearer than that: |i - j| < window
    "documents": 4,  # that many documents of equal length in a sequence
    "blocks": 0.5,  # that share of the tiles of 64 x 64, at random, and the diagonal
}
FEATURES = {
    "alibi": None,
    "softcap": 30.0,
    "sinks": None,
    "bias": None,  # [1, H, Lq, Lk]
    "learned-bias": None,  # the same, with a gradient
    "dropout": 0.1,
}
CACHES = {"paged": 64, "int8": None, "fp8": None}  # how keys and values are kept, for decoding
TERMS = STRUCTURE | FEATURES | CACHES

BLOCK = 64  # side of a tile of ``blocks``
COUNT_ROWS = 1024  # queries whose visible keys are counted at a time


@dataclass(frozen=True)
class Case:
    """One attention problem: q [batch, heads, queries, head_dim], k, v [batch, kv_heads, keys, .].

    ``mask`` says all that a call has besides: terms of ``STRUCTURE``, ``FEATURES`` and ``CACHES``
    joined by ``+``, such as ``causal+window:1024`` or ``full+softcap:30``.  What is left out
    follows the rest: ``keys`` is ``queries``, ``kv_heads`` is ``heads``, ``value_dim`` is
    ``head_dim``.
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
        _parse(self.mask)
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
        if "learned-bias" in self.terms and self.batch > 1:
            raise ValueError(f"batch is {self.batch}, expected 1 with a learned-bias")

    @property
    def terms(self) -> dict[str, float | None]:
        """The terms of ``mask`` with their numbers."""
        return _parse(self.mask)

    @property
    def structure(self) -> set[str]:
        """The terms that decide which keys are seen, without ``full``."""
        return (set(STRUCTURE) & set(self.terms)) - {"full"}

    @property
    def features(self) -> set[str]:
        """The terms that change scores or weights."""
        return set(FEATURES) & set(self.terms)

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
        if "padded" not in self.terms:
            return [self.keys] * self.batch
        steps = torch.linspace(0.25, 1.0, self.batch, dtype=torch.float64)
        return [max(1, round(self.keys * share)) for share in steps.tolist()]

    def visible(self, first: int = 0, last: int | None = None) -> Tensor:
        """[B or 1, 1, rows, Lk] bool, True = attend, of the queries from ``first`` to ``last``."""
        terms = self.terms
        i = torch.arange(self.queries, device=self.device)[first:last, None]
        j = torch.arange(self.keys, device=self.device)
        seen = torch.ones(1, 1, len(i), self.keys, dtype=torch.bool, device=self.device)
        if "causal" in terms:
            seen = seen & (j <= i)
        if "window" in terms:
            seen = seen & ((i - j).abs() < _number(terms, "window"))
        if "documents" in terms:
            q_ids, k_ids = (_document_ids(self, n) for n in (self.queries, self.keys))
            seen = seen & (q_ids[first:last, None] == k_ids)
        if "blocks" in terms:
            tiles = _tiles(self).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            seen = seen & tiles[: self.queries, : self.keys][first:last]
        if "padded" in terms:
            seen = seen & (
                j < torch.tensor(self.lengths(), device=self.device)[:, None, None, None]
            )
        if "scattered" in terms:
            seen = seen & _scattered(self)[:, None, None]
        return seen

    def visible_pairs(self) -> float:
        """(query, key) pairs that one head has to look at, over the batch."""
        structure = self.structure
        if structure == {"causal"} and self.queries == self.keys:
            return self.batch * self.queries * self.keys / 2  # the convention of the field
        if structure <= {"padded"}:
            return float(self.queries * sum(self.lengths()))
        pairs = 0.0
        for first in range(0, self.queries, COUNT_ROWS):
            seen = self.visible(first, first + COUNT_ROWS)
            pairs += float(seen.sum()) * self.batch / seen.shape[0]
        return pairs

    def flops(self, operation: str) -> float:
        """``4 B H Lq Lk D`` forward, 2.5 times that backward, 3.5 a step; half if causal."""
        per_pair = 2 * (self.head_dim + self.value_dim)
        return OPERATIONS[operation] * self.heads * self.visible_pairs() * per_pair

    def tensor_bytes(self) -> int:
        """Bytes of q, k, v and the output together."""
        width = DTYPES[self.dtype].itemsize
        q_and_out = self.batch * self.heads * self.queries * (self.head_dim + self.value_dim)
        return q_and_out * width + self.cache_bytes(width)

    def cache_bytes(self, width: int) -> int:
        """Bytes of keys and values of ``width`` bytes each."""
        return self.batch * self.kv_heads * self.keys * (self.head_dim + self.value_dim) * width


class Inputs(NamedTuple):
    """The tensors of a case, without gradients; None for what its mask does not name."""

    q: Tensor  # [B, Hq, Lq, D]
    k: Tensor  # [B, Hkv, Lk, D]
    v: Tensor  # [B, Hkv, Lk, Dv]
    dout: Tensor  # [B, Hq, Lq, Dv]
    lengths: Tensor | None = None  # [B] int32
    keep: Tensor | None = None  # [B, Lk] bool
    q_ids: Tensor | None = None  # [Lq] int32
    k_ids: Tensor | None = None  # [Lk] int32
    blocks: Tensor | None = None  # [ceil(Lq/64), ceil(Lk/64)] bool
    bias: Tensor | None = None  # [1, Hq, Lq, Lk]
    alibi: Tensor | None = None  # [Hq] float32
    sinks: Tensor | None = None  # [Hq] float32


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Normal random numbers, the same for the same seed on every machine."""
    draw, terms = torch.Generator().manual_seed(seed), case.terms

    def normal(*shape: int, dtype: torch.dtype = DTYPES[case.dtype]) -> Tensor:
        return torch.randn(shape, generator=draw).to(case.device, dtype)

    def heads(count: int, length: int, dim: int) -> Tensor:
        return normal(case.batch, count, length, dim)

    lengths = torch.tensor(case.lengths(), dtype=torch.int32, device=case.device)
    biased = bool({"bias", "learned-bias"} & set(terms))
    slopes = 2.0 ** (-8.0 * torch.arange(1, case.heads + 1) / case.heads)
    return Inputs(
        q=heads(case.heads, case.queries, case.head_dim),
        k=heads(case.kv_heads, case.keys, case.head_dim),
        v=heads(case.kv_heads, case.keys, case.value_dim),
        dout=heads(case.heads, case.queries, case.value_dim),
        lengths=lengths if "padded" in terms else None,
        keep=_scattered(case) if "scattered" in terms else None,
        q_ids=_document_ids(case, case.queries) if "documents" in terms else None,
        k_ids=_document_ids(case, case.keys) if "documents" in terms else None,
        blocks=_tiles(case) if "blocks" in terms else None,
        bias=normal(1, case.heads, case.queries, case.keys) if biased else None,
        alibi=slopes.to(case.device) if "alibi" in terms else None,
        sinks=normal(case.heads, dtype=torch.float32) if "sinks" in terms else None,
    )


def structured_mask(case: Case, inputs: Inputs) -> masks.Mask | None:
    """The mask in attnkit's algebra; None where every key is seen."""
    terms = case.terms
    parts: list[masks.Mask] = []
    if "window" in terms:
        reach = int(_number(terms, "window")) - 1
        parts.append(masks.sliding_window(reach, 0 if "causal" in terms else reach))
    elif "causal" in terms:
        parts.append(masks.causal())
    if inputs.lengths is not None:
        parts.append(masks.padding(inputs.lengths))
    if inputs.keep is not None:
        parts.append(masks.key_padding(inputs.keep))
    if inputs.q_ids is not None:
        parts.append(masks.documents(inputs.q_ids, inputs.k_ids))
    if inputs.blocks is not None:
        parts.append(masks.block_sparse(inputs.blocks))
    joined: masks.Mask | None = None
    for part in parts:
        joined = part if joined is None else joined & part
    return joined


def _parse(mask: str) -> dict[str, float | None]:
    """Terms and numbers of a mask; raises ValueError for one that is not known."""
    terms: dict[str, float | None] = {}
    for term in mask.split("+"):
        name, colon, number = term.partition(":")
        if name not in TERMS or name in terms or (colon and TERMS[name] is None):
            raise ValueError(
                f"mask is {mask!r}, expected terms of {', '.join(TERMS)}, each once, joined by + "
                "(window:1024 and others take a number)"
            )
        try:
            value = float(number) if colon else TERMS[name]
        except ValueError:
            raise ValueError(f"mask is {mask!r}, expected a number after {name}:") from None
        if value is not None and not value > 0:
            raise ValueError(f"mask is {mask!r}, expected a number above 0 after {name}:")
        terms[name] = value
    return terms


def _number(terms: dict[str, float | None], name: str) -> float:
    value = terms[name]
    assert value is not None  # its default is a number
    return value


def _document_ids(case: Case, length: int) -> Tensor:
    count = int(_number(case.terms, "documents"))
    return (torch.arange(length, device=case.device) * count // length).to(torch.int32)


def _scattered(case: Case) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    keep = torch.rand(case.batch, case.keys, generator=draw) < 0.75
    keep[:, 0] = True  # every query sees something, under a causal mask too
    return keep.to(case.device)


def _tiles(case: Case) -> Tensor:
    draw = torch.Generator().manual_seed(2)
    rows, columns = (-(-length // BLOCK) for length in (case.queries, case.keys))
    share = _number(case.terms, "blocks")
    tiles = torch.rand(rows, columns, generator=draw) < share
    tiles |= torch.eye(rows, columns, dtype=torch.bool)
    return tiles.to(case.device)
