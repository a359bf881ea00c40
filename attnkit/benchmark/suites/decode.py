"""A few queries over a long cache: bytes of keys and values read per second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import attnkit
from attnkit.benchmark.cases import DTYPES, Case, Inputs, make_inputs
from attnkit.benchmark.implementations import IMPLEMENTATIONS, implementation
from attnkit.benchmark.implementations import refusal as attention_refusal
from attnkit.benchmark.numeric import TOLERANCE, Truth, check, truth
from attnkit.benchmark.probes import READ_BYTES
from attnkit.benchmark.tasks import Suite, Work
from attnkit.cache import PagedKVCache

MOST_COPIES = 64
PAGE = 64
# beyond float noise, of the row's norm: what the 8 bits of a stored key or value take away
QUANTISED = {"int8": 0.05, "fp8": 0.2}


@dataclass
class DecodeSubject:
    """Queries, and as many caches of different memory as no processor's cache holds."""

    case: Case
    inputs: Inputs
    true: Truth
    copies: int = field(init=False)

    def __post_init__(self) -> None:
        wanted = READ_BYTES / self.case.cache_bytes(self.width(self.kind))
        self.copies = int(min(MOST_COPIES, max(1.0, wanted)))

    @classmethod
    def of(cls, case: Case, seed: int = 0) -> DecodeSubject:
        """Draw the inputs and compute the float64 results."""
        inputs = make_inputs(case, seed)
        plain = replace(case, mask="full")
        return cls(case, inputs, truth(plain, inputs))

    @property
    def kind(self) -> str:
        """How keys and values are kept."""
        return next((k for k in ("int8", "fp8", "paged") if k in self.case.terms), "plain")

    def width(self, kind: str) -> int:
        """Bytes of a stored number."""
        return 1 if kind in QUANTISED else DTYPES[self.case.dtype].itemsize

    def prepare(self, name: str, operation: str) -> Work:
        """See ``Contest``.  Peers read the plain cache, whatever attnkit reads."""
        family, _, backend = name.partition(":")
        kind = self.kind if family == "attnkit" else "plain"
        if family == "attnkit":
            calls = [self._ours(kind, backend) for _ in range(self.copies)]
        elif name in ("onnxruntime", "openvino"):  # with buffers of their own
            calls = [self._theirs(name, self.inputs) for _ in range(self.copies)]
        else:
            calls = [
                self._theirs(name, self.inputs._replace(k=k.clone(), v=v.clone()))
                for k, v in [(self.inputs.k, self.inputs.v)] * self.copies
            ]
        turn = 0

        def call() -> Tensor:
            nonlocal turn
            turn = (turn + 1) % len(calls)
            with torch.no_grad():
                return calls[turn]()

        q = self.inputs.q
        size = self.case.cache_bytes(self.width(kind)) + q.nbytes + self.inputs.dout.nbytes
        return Work(call, lambda: (call(),), bytes=float(size))

    def check(self, name: str, operation: str, results: Sequence[Tensor]) -> dict[str, float]:
        """See ``Contest``."""
        kind = self.kind if name.startswith("attnkit") else "plain"
        tolerance = TOLERANCE[self.case.dtype] + QUANTISED.get(kind, 0.0)
        return check(f"{name} {operation} on {self.case.label}", results, self.true, tolerance)

    def ran(self, name: str) -> str:
        """See ``Contest``."""
        family, _, backend = name.partition(":")
        if family != "attnkit" or backend:
            return backend or family
        return decode_backend(self.inputs)

    def _theirs(self, name: str, inputs: Inputs) -> Callable[[], Tensor]:
        plain = replace(self.case, mask="full")
        return partial(implementation(name, plain, inputs), *inputs[:3])

    def _ours(self, kind: str, backend: str) -> Callable[[], Tensor]:
        q, k, v = (x.clone() for x in self.inputs[:3])
        if kind == "plain":
            lengths = torch.full((len(q),), k.shape[2], dtype=torch.int32, device=q.device)
            attend: Callable[[], Any] = partial(
                attnkit.decode_attention, q, k, v, lengths, causal=False
            )
        else:
            attend = _paged(q, k, v, kind)

        def forced() -> Any:
            with attnkit.use_backend(backend):
                return attend()

        return forced if backend else attend


def decode_backend(inputs: Inputs) -> str:
    """The backend that serves decoding of these inputs: the first with nothing against it."""
    from attnkit import dispatch
    from attnkit.spec import NO_CACHE, AttentionSpec, TensorArgs

    q, k, v = inputs[:3]
    lengths = torch.full((len(q),), k.shape[2], dtype=torch.int32, device=q.device)
    spec, args = AttentionSpec(q.shape[-1] ** -0.5), TensorArgs(lengths=lengths)
    return dispatch.select_decode(q, k, v, args, spec, NO_CACHE).__name__.rpartition(".")[2]


def _paged(q: Tensor, k: Tensor, v: Tensor, kind: str) -> Callable[[], Tensor]:
    """attnkit's cache in pages, out of order, filled with k and v [B, Hkv, S, D]."""
    batch, heads, length, dim = k.shape
    pages = -(-length // PAGE)
    cache = PagedKVCache.allocate(
        batch * pages,
        PAGE,
        heads,
        dim,
        v.shape[-1],
        max_sequences=batch,
        max_pages_per_sequence=pages,
        dtype=k.dtype,
        device=k.device,
        quantize=kind if kind in QUANTISED else None,
    )
    ids = cache.add(batch)
    for start in range(0, length, PAGE):  # page by page: neighbours belong to other sequences
        cache.append(k[:, :, start : start + PAGE], v[:, :, start : start + PAGE], ids)
    return lambda: cache.attend(q, ids, causal=False)


def _names(operation: str) -> tuple[str, ...]:
    return tuple(IMPLEMENTATIONS)


def _refusal(name: str, case: Case, operation: str) -> str | None:
    others = set(case.terms) - {"full", "paged", "int8", "fp8"}
    if others:
        return f"decoding is measured without {' and '.join(sorted(others))}"
    return attention_refusal(name, replace(case, mask="full"), operation)


SUITES = {
    "decode": Suite(
        "a few queries over a long cache, plain, in pages, in 8 bits",
        ("decode",),
        _names,
        _refusal,
        DecodeSubject.of,
        lambda case, operation: replace(case, mask="full").flops("forward"),
        "bytes",
    ),
}
