"""What results owe their bits to: PROMISES, and `broken`, which tries one of them.

    repeat   another run of the same call gives the same bits
    threads  so does any number of threads
    batch    a sequence's bits do not depend on the other sequences of the call
    prefix   nor, under a causal mask, on the queries and keys that come after
    paged    nor on where a cache holds its slots: side by side, or in pages

docs/determinism.md is this table in words; tests/test_promises.py tries every entry of it, and
`attnkit verify` does so on the user's machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit import testing
from attnkit._slots import quantise
from attnkit.spec import AttentionSpec, CacheArgs, TensorArgs
from attnkit.testing import Case, Inputs

KINDS = ("repeat", "threads", "batch", "prefix", "paged")
OPERATIONS = {  # by the names that docs/determinism.md uses
    "forward": "output and lse of attention",
    "backward": "gradients of query, key, value, bias and sinks",
    "packed": "packed sequences (varlen_attention), output and gradients",
    "decode": "decode_attention, of caches in the model's dtype, int8 and fp8",
    "append": "new keys and values on their way into a cache",
}
# (operation, backend) -> what is promised.  No entry: the backend has no such operation.  A GPU
# runs blocks in another order each time, so that there "repeat" says all that "threads" could.
PROMISES: dict[tuple[str, str], tuple[str, ...]] = {
    ("forward", "cpu"): ("repeat", "threads", "batch", "prefix"),
    ("backward", "cpu"): ("repeat", "threads", "batch"),
    ("packed", "cpu"): ("repeat", "threads", "batch"),
    ("decode", "cpu"): ("repeat", "threads", "batch", "paged"),
    ("append", "cpu"): ("repeat", "threads", "batch", "paged"),
    ("forward", "cuda"): ("repeat", "batch"),
    ("decode", "cuda"): ("repeat", "batch", "paged"),
    ("append", "cuda"): ("repeat", "batch", "paged"),
    ("forward", "triton"): ("repeat", "batch"),
    ("backward", "triton"): ("repeat", "batch"),
    ("packed", "triton"): ("repeat", "batch"),
    ("decode", "triton"): ("repeat", "batch"),
    ("forward", "reference"): ("repeat",),
    ("backward", "reference"): ("repeat",),
    ("packed", "reference"): ("repeat",),
    ("decode", "reference"): ("repeat",),
    ("append", "reference"): ("repeat", "batch", "paged"),
}

Bits = tuple["Tensor | None", ...]


def broken(
    operation: str, kind: str, module: ModuleType, dtype: torch.dtype, device: str = "cpu"
) -> list[str]:
    """Try one promise of a backend module; what differs, a sentence each (none: it is kept).

    Raises:
        KeyError: there is no such operation or kind.
    """
    return list(_TRIALS[operation, kind](Runner(module, device), dtype))


# ---------------------------------------------------------------- calls


class Runner(NamedTuple):
    """One backend on one device."""

    module: ModuleType
    device: str

    def forward(self, x: Inputs) -> Bits:
        """Out and lse."""
        return self._back(self.module.forward(*moved(x[:5], self.device)))

    def backward(self, x: Inputs) -> Bits:
        """The five gradients."""
        here = moved(x, self.device)
        out, lse = self.module.forward(*here[:5])
        return self._back(
            self.module.backward(
                here.dout, here.dlse, *here[:3], out, lse, here.args, here.spec, _needs(x)
            )
        )

    def both(self, x: Inputs) -> Bits:
        """Out, lse and the five gradients."""
        return (*self.forward(x), *self.backward(x))

    def decode(self, step: Step) -> Bits:
        """Out and lse of queries over a cache."""
        return self._back(self.module.decode(*moved(step, self.device)))

    def append(self, step: Step) -> Bits:
        """The slots of a cache, in order, after as many new tokens as `step` has queries."""
        new = [t[:, :: t.shape[1] // step.k.shape[1]] for t in (step.q, step.q.flip(2))]
        caches = [t.clone() for t in (step.k, step.v)]
        scales = [None if s is None else s.clone() for s in step.cache[3:]]
        cache = step.cache._replace(k_scale=scales[0], v_scale=scales[1])
        here = moved((*new, *caches, step.args.lengths, cache), self.device)
        self.module.append(*here)
        after = (*here[2:4], *here[5][3:])
        table = step.cache.block_table
        return self._back(t if t is None else in_order(t.cpu(), table) for t in after)

    def _back(self, results: Any) -> Bits:
        return tuple(t if t is None else t.cpu() for t in results)


def _needs(x: Inputs) -> tuple[bool, ...]:
    bias = x.args.bias is not None and x.args.bias.is_floating_point()
    return (True, True, True, bias, x.args.sinks is not None)


def moved(value: Any, device: str) -> Any:
    """Tensors, and (named) tuples of them, on a device; stride 0 stays what it is."""
    if isinstance(value, Tensor):
        if value.device.type == torch.device(device).type:
            return value
        narrow = value
        for d in range(value.dim()):
            if value.stride(d) == 0:
                narrow = narrow.narrow(d, 0, min(1, value.shape[d]))
        return narrow.to(device).expand(value.shape)
    if isinstance(value, tuple):
        parts = [moved(v, device) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


# ---------------------------------------------------------------- caches


class Step(NamedTuple):
    """A decoding step, as a backend takes it; whatever is past a length is NaN, or has that scale.

    k and v are [B, Hkv, slots, .], or [pages, Hkv, page size, .] with cache.block_table.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    args: TensorArgs
    spec: AttentionSpec
    cache: CacheArgs


def decode_step(
    dtype: torch.dtype,
    queries: int = 1,
    lengths: tuple[int, ...] = (300, 5, 37),
    stored: torch.dtype | None = None,
    page: int | None = None,
    seed: int = 0,
) -> Step:
    """The same numbers whatever `page`: heads (4, 2), head dim 64, room for 16 more slots."""
    g = torch.Generator().manual_seed(seed)
    batch, room = len(lengths), -(-(max(lengths) + 16) // 64) * 64
    q = torch.randn(batch, 4, queries, 64, generator=g).to(dtype)
    past = torch.arange(room) >= torch.tensor(lengths)[:, None]
    stores, scales = [], []
    table = None
    if page is not None:
        width = -(-room // page)
        pages = torch.randperm(batch * width, generator=torch.Generator().manual_seed(page))
        table = pages.view(batch, width).to(torch.int32)
    for _ in range(2):
        t, scale = torch.randn(batch, 2, room, 64, generator=g).to(dtype), None
        if stored is None:
            t.masked_fill_(past[:, None, :, None], math.nan)
        else:
            t, scale = quantise(t, stored)
            scale.masked_fill_(past[:, None], math.nan)
        if page is not None and table is not None:
            t = in_pages(t, table, page)
            scale = None if scale is None else in_pages(scale, table, page)
        stores.append(t)
        scales.append(scale)
    k, v = stores
    return Step(
        q,
        k,
        v,
        TensorArgs(lengths=torch.tensor(lengths, dtype=torch.int32)),
        AttentionSpec(0.125, right=0, bottom_right=True),
        CacheArgs(None, table, None, *scales),
    )


def in_pages(t: Tensor, table: Tensor, size: int) -> Tensor:
    """[B, H, slots, ...] as [pages, H, size, ...], where table [B, W] says."""
    raw = t.view(torch.int8) if t.element_size() == 1 else t  # fp8 has few operations
    room = table.shape[1] * size
    padded = raw.new_zeros(*raw.shape[:2], room, *raw.shape[3:])
    padded[:, :, : raw.shape[2]] = raw
    pages = raw.new_zeros(table.numel(), raw.shape[1], size, *raw.shape[3:])
    for b, row in enumerate(table.tolist()):
        for n, page in enumerate(row):
            pages[page] = padded[b, :, n * size : (n + 1) * size]
    return pages.view(t.dtype)


def in_order(t: Tensor, table: Tensor | None) -> Tensor:
    """`in_pages` undone; t itself without a table."""
    if table is None:
        return t
    raw = t.view(torch.int8) if t.element_size() == 1 else t
    rows = [torch.cat([raw[page] for page in row], 1) for row in table.tolist()]
    return torch.stack(rows).view(t.dtype)


# ---------------------------------------------------------------- trials

# Sizes at which every loop of a kernel has a whole tile and a rest; the second of `_THREADED` has
# heads enough for one worker each, the first makes workers share a head.
_ALIKE: dict[str, Any] = {"dim": 64, "heads": 4, "kv_heads": 2}
_PLAIN = [
    Case("causal", 2, queries=40, keys=70, right=0, bottom_right=True, sinks=True, **_ALIKE),
    Case("lengths", 3, queries=40, keys=70, hide="lengths", **_ALIKE),
]
_RICH = [
    Case("bias", 2, queries=40, keys=70, bias="float:11qk", sinks=True, **_ALIKE),
    Case("dropout", 2, queries=40, keys=70, dropout_p=0.3, softcap=3.0, alibi="head", **_ALIKE),
    Case("documents", 2, queries=70, keys=70, hide="segments+keep", **_ALIKE),
]
_THREADED = [
    Case("one head", 1, 1, 1, 300, 300, 64, right=0),
    Case("many heads", 2, 8, 4, 150, 170, 64, hide="lengths", sinks=True),
    Case("bias", 2, 4, 2, 150, 170, 64, bias="float:11qk"),
]
_BATCHED = [
    Case("lengths", 3, queries=40, keys=70, hide="lengths", right=20, **_ALIKE),
    Case("one query", 3, queries=1, keys=70, right=0, bottom_right=True, **_ALIKE),
]
_PREFIXED = [
    Case("causal", 1, 4, 2, 130, 130, 64, right=0),
    Case("more", 1, 4, 2, 130, 130, 64, left=50, right=0, alibi="head", sinks=True, softcap=3.0),
]
_PACKED = Case("", dim=64, packed=((40, 70), (1, 9), (33, 33)), right=0, bottom_right=True)
_PACKED_THREADED = Case(
    "", dim=64, packed=((200, 150), (3, 4), (150, 260)), right=0, bottom_right=True
)
_STORED = (None, torch.int8, torch.float8_e4m3fn)


def _differ(what: str, a: Bits, b: Bits) -> Iterator[str]:
    for n, (x, y) in enumerate(zip(a, b, strict=True)):
        if (x is None) != (y is None):
            yield f"{what}: result {n} is there once only"
        elif x is not None and y is not None and not same_bits(x, y):
            yield f"{what}: the bits of result {n} differ"


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Bit for bit, NaN with NaN."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if x.dtype == torch.float8_e4m3fn:
        return torch.equal(x.view(torch.int8), y.view(torch.int8))
    return bool(((x == y) | ((x != x) & (y != y))).all())


@contextmanager
def _threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _again(what: str, call: Callable[[], Bits]) -> Iterator[str]:
    with testing.poisoned_memory():
        first = call()
    yield from _differ(f"{what}, once more", call(), first)


def _any_threads(what: str, call: Callable[[], Bits]) -> Iterator[str]:
    with _threads(1):
        want = call()
    for n in (2, 3):
        with _threads(n):
            yield from _differ(f"{what}, {n} threads", call(), want)


def _served(run: Runner, x: Inputs) -> bool:
    return run.module.supports(*moved(x[:5], run.device)) is None


def _attention(
    trial: Callable[[str, Callable[[], Bits]], Iterator[str]], cases: list[Case], name: str
) -> Callable[[Runner, torch.dtype], Iterator[str]]:
    def go(run: Runner, dtype: torch.dtype) -> Iterator[str]:
        for case in cases:
            x = testing.build(case, dtype)
            if _served(run, x):
                yield from trial(case.name, lambda x=x: getattr(run, name)(x))  # type: ignore[misc]

    return go


def alone(x: Inputs, b: int) -> Inputs:
    """Sequence b of a call: of the batch, or of those that are packed."""
    if x.args.cu_seqlens_q is not None and x.args.cu_seqlens_k is not None:
        (i, i_end), (j, j_end) = (
            cu[b : b + 2].tolist() for cu in (x.args.cu_seqlens_q, x.args.cu_seqlens_k)
        )
        ends = [torch.tensor([0, n], dtype=torch.int32) for n in (i_end - i, j_end - j)]
        args = x.args._replace(cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])
        k, v = (t[:, :, j:j_end] for t in (x.k, x.v))
        rows = (t[:, :, i:i_end] for t in (x.q, x.dout, x.dlse))
        q, dout, dlse = rows
        return Inputs(q, k, v, args, x.spec, dout, dlse)
    one = slice(b, b + 1)
    of_batch = {
        name: t[one]
        for name, t in x.args._asdict().items()
        if t is not None and name not in ("sinks", "seed") and t.shape[0] != 1
    }
    q, k, v, dout, dlse = (t[one] for t in (x.q, x.k, x.v, x.dout, x.dlse))
    return Inputs(q, k, v, x.args._replace(**of_batch), x.spec, dout, dlse)


def _attention_alone(
    cases: list[Case], name: str
) -> Callable[[Runner, torch.dtype], Iterator[str]]:
    def go(run: Runner, dtype: torch.dtype) -> Iterator[str]:
        for case in cases:
            x = testing.build(case, dtype)
            if not _served(run, x):
                continue
            whole = getattr(run, name)(x)
            for b in range(case.batch):
                got = getattr(run, name)(alone(x, b))
                want = tuple(t if t is None else t[b : b + 1] for t in whole)
                # those of sinks are sums over the batch
                yield from _differ(f"{case.name}, sequence {b} alone", got[:3], want[:3])

    return go


def _packed_alone(run: Runner, dtype: torch.dtype) -> Iterator[str]:
    x = testing.build(_PACKED, dtype)
    whole = run.both(x)
    i = j = 0
    for b, (queries, keys) in enumerate(_PACKED.packed):
        out, lse, dq, dk, dv = whole[:5]
        want: list[Tensor] = [t[:, :, i : i + queries] for t in (out, lse, dq) if t is not None]
        want += [t[:, :, j : j + keys] for t in (dk, dv) if t is not None]
        got = run.both(alone(x, b))[:5]
        yield from _differ(f"packed sequence {b} alone", got, tuple(want))
        i, j = i + queries, j + keys


def _prefixes(run: Runner, dtype: torch.dtype) -> Iterator[str]:
    for case in _PREFIXED:
        x = testing.build(case, dtype)
        whole = run.forward(x)
        for n in (1, 2, 17, 64, 65, 100):
            q, k, v = (t[:, :, :n] for t in x[:3])
            got = run.forward(x._replace(q=q, k=k, v=v))
            want = tuple(t if t is None else t[:, :, :n] for t in whole)
            yield from _differ(f"{case.name}, the first {n} rows", got, want)


def _steps(
    run: Runner, dtype: torch.dtype, page: int | None = None, **options: Any
) -> Iterator[tuple[str, Step]]:
    for stored in _STORED[:1] if dtype == torch.float64 else _STORED:
        for queries in (1, 4):
            step = decode_step(dtype, queries, stored=stored, page=page, **options)
            what = f"{queries} queries, cache in {str(stored or dtype)[6:]}"
            if run.module.supports_decode(*moved(step, run.device)) is None:
                yield what, step


def _cached(
    trial: Callable[[str, Callable[[], Bits]], Iterator[str]], name: str
) -> Callable[[Runner, torch.dtype], Iterator[str]]:
    def go(run: Runner, dtype: torch.dtype) -> Iterator[str]:
        for what, step in _steps(run, dtype, page=16, lengths=(600, 5, 300)):
            yield from trial(what, lambda s=step: getattr(run, name)(s))  # type: ignore[misc]

    return go


def _cached_alone(name: str) -> Callable[[Runner, torch.dtype], Iterator[str]]:
    def go(run: Runner, dtype: torch.dtype) -> Iterator[str]:
        for what, step in _steps(run, dtype):
            whole = getattr(run, name)(step)
            for b in range(len(step.q)):
                one = slice(b, b + 1)
                cache = CacheArgs(*(t if t is None else t[one] for t in step.cache))
                args = step.args._replace(lengths=step.args.lengths[one])  # type: ignore[index]
                few = Step(step.q[one], step.k[one], step.v[one], args, step.spec, cache)
                want = tuple(t if t is None else t[one] for t in whole)
                yield from _differ(f"{what}, sequence {b} alone", getattr(run, name)(few), want)

    return go


def _cached_in_pages(name: str) -> Callable[[Runner, torch.dtype], Iterator[str]]:
    def go(run: Runner, dtype: torch.dtype) -> Iterator[str]:
        for size in (8, 64):
            for (what, plain), (_, paged) in zip(
                _steps(run, dtype), _steps(run, dtype, size), strict=True
            ):
                got, want = getattr(run, name)(paged), getattr(run, name)(plain)
                yield from _differ(f"{what}, pages of {size}", got, want)

    return go


def _packed(
    trial: Callable[[str, Callable[[], Bits]], Iterator[str]], case: Case
) -> Callable[[Runner, torch.dtype], Iterator[str]]:
    return _attention(trial, [case], "both")


_TRIALS: dict[tuple[str, str], Callable[[Runner, torch.dtype], Iterator[str]]] = {
    ("forward", "repeat"): _attention(_again, _PLAIN + _RICH, "forward"),
    ("forward", "threads"): _attention(_any_threads, _THREADED, "forward"),
    ("forward", "batch"): _attention_alone(_BATCHED, "forward"),
    ("forward", "prefix"): _prefixes,
    ("backward", "repeat"): _attention(_again, _PLAIN + _RICH, "backward"),
    ("backward", "threads"): _attention(_any_threads, _THREADED, "backward"),
    ("backward", "batch"): _attention_alone(_BATCHED, "backward"),
    ("packed", "repeat"): _packed(_again, _PACKED),
    ("packed", "threads"): _packed(_any_threads, _PACKED_THREADED),
    ("packed", "batch"): _packed_alone,
    ("decode", "repeat"): _cached(_again, "decode"),
    ("decode", "threads"): _cached(_any_threads, "decode"),
    ("decode", "batch"): _cached_alone("decode"),
    ("decode", "paged"): _cached_in_pages("decode"),
    ("append", "repeat"): _cached(_again, "append"),
    ("append", "threads"): _cached(_any_threads, "append"),
    ("append", "batch"): _cached_alone("append"),
    ("append", "paged"): _cached_in_pages("append"),
}
