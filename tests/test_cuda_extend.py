"""Appending and attending in one call, and what the operators do with memory: tensors that do not
start at multiples of 16 bytes, nothing read by the host, nothing told to the driver twice.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnkit import testing
from attnkit.backends import reference
from attnkit.nn import RotaryEmbedding
from attnkit.spec import AttentionSpec, CacheArgs, RotaryTables, TensorArgs
from attnkit.testing import Inputs, Results

sys.path.insert(0, str(Path(__file__).parent))
from cuda_kernels import (
    DTYPES,
    LIBRARY,
    PLACES,
    STORED,
    VARIANT,
    Case,
    Kernels,
    build,
    built,
    choose,
    decode,
    emulated,
    refused,
    skip_what_is_not_planted,
)  # fmt: skip

HEADS, D = 2, 64
LENGTHS = (0, 7, 61)


@pytest.fixture(params=PLACES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    chosen = choose(request.param)
    if not hasattr(chosen.module, "extend"):
        pytest.skip(f"{request.param}: it has no call that appends and attends")
    return chosen


def moved(value: object, device: str) -> object:
    return value.to(device) if isinstance(value, Tensor) else value


class Setting:
    """A cache with tokens in it, new ones, and queries; the cache's free slots hold NaN."""

    def __init__(
        self,
        dtype: str,
        stored: str | None,
        page: int | None,
        n: int,
        queries: int,
        rotary: str | None = None,
    ) -> None:
        g = torch.Generator().manual_seed(5)
        b, size = len(LENGTHS), page or 96
        real, kept = DTYPES[dtype], DTYPES[dtype] if stored is None else STORED[stored]
        self.q = torch.randn(b, queries, 4 * HEADS, D, generator=g).to(real).transpose(1, 2)
        self.k, self.v = (torch.randn(b, HEADS, n, D, generator=g).to(real) for _ in "kv")
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        width = -(-96 // size)
        count = b * width + 2
        ids = torch.randperm(count, generator=g)[: b * width].view(b, width).int()
        self.caches, self.scales = [], []
        for _ in "kv":
            t = torch.randn(count, HEADS, size, D, generator=g)
            scale = None
            if stored is not None:
                t, scale = reference.quantise(t, kept)
            self.caches.append(t.to(kept))
            self.scales.append(scale)
        self.ids = ids if page else ids[:, 0]
        self.page, self.size = page, size
        self.rotary = RotaryTables()
        if rotary:
            self.rope = RotaryEmbedding(D, 32, interleaved=rotary == "interleaved")
            tables = self.rope.tables(torch.arange(128), torch.float32)
            self.rotary = RotaryTables(*tables, self.rope.interleaved)
        free = torch.arange(width * size) >= self.lengths[:, None]  # [B, capacity]
        for i in range(b):
            for slot in free[i].nonzero().flatten().tolist():
                row = int(ids[i, slot // size])
                for t, scale in zip(self.caches, self.scales, strict=True):
                    if scale is None:
                        t[row, :, slot % size] = torch.nan
                    else:
                        scale[row, :, slot % size] = torch.nan

    def where(self, scales: list[Tensor | None], device: str) -> CacheArgs:
        ids = self.ids.to(device)
        table, index = (ids, None) if self.page else (None, ids)
        return CacheArgs(None, table, index, *scales)

    def copies(self, device: str) -> tuple[list[Tensor], CacheArgs]:
        scales = [None if t is None else t.clone().to(device) for t in self.scales]
        return [t.clone().to(device) for t in self.caches], self.where(scales, device)

    def values(self, i: int, caches: list[Tensor], cache: CacheArgs, length: int) -> list[Tensor]:
        """Keys and values [1, Hkv, length, D] of sequence i, in float64."""
        slots = torch.arange(length)
        rows = self.ids[i].long()[slots // self.size] if self.page else self.ids[i].expand(length)
        found = []
        for t, scale in zip(caches, cache[3:], strict=True):
            x = t.cpu()[rows.long(), :, slots % self.size].double()  # [length, Hkv, D]
            if scale is not None:
                x = x * scale.cpu()[rows.long(), :, slots % self.size].double()[..., None]
            found.append(x.transpose(0, 1)[None])
        return found


def extend(
    kernels: Kernels, x: Setting, spec: AttentionSpec, query_step: int | None, splits: int = 0
) -> tuple[Results, list[Tensor], CacheArgs]:
    """What the call returns, and what it leaves in the cache."""
    skip_what_is_not_planted(x.q)
    on = kernels.device
    more = {} if kernels.name == "cpu" else {"splits": splits}

    def call() -> tuple[Tensor, ...]:
        caches, where = x.copies(on)
        q, k, v, lengths = (t.to(on) for t in (x.q, x.k, x.v, x.lengths))
        rotary = RotaryTables(*(moved(t, on) for t in x.rotary))
        args = TensorArgs(lengths=lengths)
        assert kernels.module.supports_extend(q, k, v, *caches, args, spec, where) is None
        out = kernels.module.extend(q, k, v, *caches, args, spec, where, rotary, query_step, **more)
        assert torch.equal(lengths.cpu(), x.lengths)
        stored = [t.view(torch.uint8) for t in (*caches, *(t for t in where[3:] if t is not None))]
        return *out, *stored

    out, lse, *stored = (t.cpu() for t in kernels.run(call))
    caches = [t.view(old.dtype) for t, old in zip(stored[:2], x.caches, strict=True)]
    scales = [t.view(torch.float32) for t in stored[2:]] or [None, None]
    return Results(out, lse), caches, x.where(scales, "cpu")


SHAPES = [(None, 1, 1), (16, 5, 3), (8, 3, 20)]  # slots of a page, new tokens, queries
KINDS = ["bf16", "fp16", "fp32", "bf16 int8", "fp32 fp8"]
ROTARY = [None, "halves", "interleaved"]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_append_and_decode(kernels, kind, shape):
    """The cache to the bit what `append` leaves; the output that of `decode` over it, in truth."""
    page, n, queries = shape
    rotary = ROTARY[(KINDS.index(kind) + SHAPES.index(shape)) % 3]
    dtype, stored = (*kind.split(), None)[:2]
    x = Setting(dtype, stored, page, n, queries, rotary)
    skip_what_is_not_planted(x.q)
    spec = AttentionSpec(D**-0.5, 30 if n == 5 else None, 0, True)
    step = None if rotary is None else int(n != 5)
    got, caches, where = extend(kernels, x, spec, step)

    on = kernels.device
    want, other = x.copies(on)
    rotary_tables = RotaryTables(*(moved(t, on) for t in x.rotary))
    module = kernels.module
    module.append(x.k.to(on), x.v.to(on), *want, x.lengths.to(on), other, rotary_tables)
    for a, b in zip((*caches, *where[3:]), (*want, *other[3:]), strict=True):
        assert a is None or torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8))

    lengths = x.lengths + n
    q = x.q
    if step is not None:
        places = x.lengths.long()[:, None] + step * torch.arange(queries)
        q = x.rope(x.q.double(), places).to(x.q.dtype)
    elif rotary is None:
        args = TensorArgs(lengths=lengths.to(on))
        same = module.decode(q.to(on), *want, args, spec, other)
        assert torch.equal(got.out, same[0].cpu())
        assert torch.equal(got.lse, same[1].cpu())
    for i, length in enumerate(lengths.tolist()):
        k, v = x.values(i, caches, where, length)
        none = torch.zeros(1, *q.shape[1:3], D)
        own = Inputs(q[i : i + 1], k, v, TensorArgs(), spec, none, none[..., 0])
        one = Results(got.out[i : i + 1], got.lse[i : i + 1])
        if step is None:
            testing.check(one, testing.expect(own, gradients=False), f"sequence {i}")
            continue
        # queries are rotated in float32 and rounded, now and then to another side than here
        truth = reference.forward(*(t.double() for t in own[:3]), TensorArgs(), spec)
        bound = 1e-5 if dtype == "fp32" else 8 * torch.finfo(DTYPES[dtype]).eps
        torch.testing.assert_close(one.out.double(), truth[0], rtol=bound, atol=bound)
        torch.testing.assert_close(one.lse.double(), truth[1], rtol=bound, atol=bound)


@pytest.mark.parametrize("splits", [1, 3, -1])
def test_splits_see_the_new_tokens(kernels, splits):
    if kernels.name == "cpu":
        pytest.skip("the CPU kernels have one rule")
    x, spec = Setting("bf16", None, 16, 2, 1), AttentionSpec(D**-0.5, None, 0, True)
    got, caches, where = extend(kernels, x, spec, None, splits)
    on = kernels.device
    args = TensorArgs(lengths=(x.lengths + 2).to(on))
    want = kernels.module.decode(
        x.q.to(on), *(t.to(on) for t in caches), args, spec,
        CacheArgs(*(moved(t, on) for t in where)), splits=splits,
    )  # fmt: skip
    assert torch.equal(got.out, want[0].cpu())
    assert torch.equal(got.lse, want[1].cpu())


def test_no_new_tokens_or_no_queries(kernels):
    spec = AttentionSpec(D**-0.5, None, 0, True)
    x = Setting("fp32", None, 16, 0, 2)
    got, caches, where = extend(kernels, x, spec, None)
    for old, new in zip(x.caches, caches, strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))
    for i, length in enumerate(LENGTHS):
        k, v = x.values(i, caches, where, length)
        want = reference.forward(x.q[i : i + 1].double(), k, v, TensorArgs(), spec)
        torch.testing.assert_close(got.out[i : i + 1].double(), want[0], rtol=1e-5, atol=1e-5)
    got, caches, _ = extend(kernels, Setting("fp32", None, 16, 3, 0), spec, None)
    assert got.out.shape == (3, 4 * HEADS, 0, D)
    assert any(
        not torch.equal(old.view(torch.uint8), new.view(torch.uint8))
        for old, new in zip(x.caches, caches, strict=True)
    )


def test_extend_refuses(kernels):
    """And has written nothing."""
    spec, x = AttentionSpec(D**-0.5, None, 0, True), Setting("fp32", None, None, 4, 4, "halves")
    for lengths in ([0, 7, 93], [0, -1, 3]):
        x.lengths = torch.tensor(lengths, dtype=torch.int32)
        text = "no room for its new tokens|lengths.[012]. asks"
        refused(kernels, lambda: extend(kernels, x, spec, None), text)
    x.lengths = torch.tensor([0, 7, 92], dtype=torch.int32)
    short = x.rotary._replace(cos=x.rotary.cos[:95], sin=x.rotary.sin[:95])
    x.rotary = short
    refused(kernels, lambda: extend(kernels, x, spec, 1), "positions")


def test_emulated_extend_says_what_does_not_fit():
    module, x = emulated(), Setting("fp32", None, 16, 2, 1, "halves")
    caches, where = x.copies("cpu")
    args, spec = TensorArgs(lengths=x.lengths), AttentionSpec(1.0, None, 0, True)
    good = {"q": x.q, "k": x.k, "v": x.v, "k_cache": caches[0], "v_cache": caches[1], "args": args,
            "spec": spec, "cache": where, "rotary": x.rotary, "query_step": 1}  # fmt: skip
    for change, text in [
        ({"k": x.k[:, :1]}, r"k \[3, 1, 2, 64\], v \[3, 2, 2, 64\], .* do not fit"),
        ({"k": x.k.double()}, "k has dtype Double, expected Float"),
        ({"k": x.k.half(), "v": x.v.half()}, "k is Half, v Half, k_cache Float"),
        ({"q": x.q[..., :32]}, r"q \[3, 8, 1, 32\], k \[.*\] and v \[.*\] do not fit together"),
        ({"q": x.q[:, :3]}, "heads a multiple of kv heads"),
        ({"args": args._replace(lengths=None)}, "lengths is missing"),
        ({"args": TensorArgs(lengths=x.lengths[:2])}, r"lengths has shape \[2\], expected \[3\]"),
        ({"args": TensorArgs(lengths=x.lengths.long())}, "lengths has dtype Long, expected Int"),
        ({"args": args._replace(bias=x.q)}, "bias is given, expected none"),
        ({"rotary": RotaryTables()}, "cos is missing, expected tables to rotate"),
        ({"rotary": x.rotary._replace(sin=None)}, "sin is missing, expected cos and sin together"),
        ({"query_step": 2}, "query_step is 2, expected 0 or 1"),
        ({"splits": 129}, "splits is 129, expected -1 to 128"),
        ({"cache": where._replace(batch_index=x.lengths)}, "block_table and batch_index are both"),
        ({"cache": where._replace(k_scale=x.q[0])}, "k_scale is given, expected none"),
    ]:  # fmt: skip
        with pytest.raises(RuntimeError, match=text):
            module.extend(**{**good, **change})
    for old, new in zip(x.caches, caches, strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


# ---------------------------------------------------------------- memory


def shifted(t: Tensor, by: int) -> Tensor:
    """The same numbers in the same strides, `by` elements behind a multiple of 16 bytes."""
    room = torch.full((t.untyped_storage().nbytes() // t.element_size() + by,), 0, dtype=t.dtype)
    out = room[by:].as_strided(t.shape, t.stride())
    assert out.data_ptr() % 16 != 0
    return out.copy_(t)


@pytest.mark.parametrize("by", [1, 3])
@pytest.mark.parametrize("kind", ["bf16", "fp32", "bf16 int8"])
@pytest.mark.parametrize("queries", [1, 3, 20])
def test_emulated_operators_copy_what_is_misaligned(kind, queries, by):
    """By the operators themselves: a compiled call does not know where a tensor starts."""
    dtype, stored = (*kind.split(), None)[:2]
    step = build(Case((64, 64), (2, 1), queries, (70, 5), dtype, stored, 16))
    module = emulated()
    q, k, v, args, spec, cache, _ = step
    want = module.decode(q, k, v, args, spec, cache)
    moved = [shifted(t, by) for t in (q, k, v)]
    assert "multiples of 16 bytes" in (module.supports_decode(*moved, args, spec, cache) or "")
    got = module.decode(*moved, args, spec, cache)
    gaps = [torch.nn.functional.pad(t.view(torch.int8), (0, 1)).view(torch.int8)[..., :-1]
            .view(t.dtype) if t.element_size() == 1 else t for t in (q, k, v)]  # fmt: skip
    for other in (got, module.decode(*gaps, args, spec, cache)):
        assert torch.equal(other[0], want[0])
        assert torch.equal(other[1], want[1])
    if stored is None:
        plain = [t[:2, :, :16].contiguous() for t in (q, k.nan_to_num(), v.nan_to_num())]
        rule = AttentionSpec(0.1, None, 0, True)
        want = module.forward(*plain, TensorArgs(), rule)
        got = module.forward(*(shifted(t, by) for t in plain), TensorArgs(), rule)
        assert torch.equal(got[0], want[0])
    caches, new = [t.clone() for t in (k, v)], torch.randn(2, 1, 4, 64).to(q.dtype)
    table = torch.arange(len(k)).int()[:2, None]  # pages of their own for what is appended
    where = [cache._replace(block_table=table, **{
        name: None if stored is None else getattr(cache, name).clone()
        for name in ("k_scale", "v_scale")}) for _ in range(2)]  # fmt: skip
    held = TensorArgs(lengths=torch.zeros(2, dtype=torch.int32))
    want = module.extend(q, new, new, *caches, held, spec, where[0])
    moved = [shifted(t, by) for t in (q, new, new, k, v)]
    got = module.extend(*moved, held, spec, where[1])
    assert torch.equal(got[0], want[0])
    for a, b in zip(moved[3:], caches, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.skipif(VARIANT != "plain" or bool(LIBRARY), reason="it counts what the driver is told")
def test_the_driver_is_told_once_how_much_memory_a_kernel_may_have():
    emulated()
    step = build(Case((256, 256), (2, 1), 20, (70, 5)))  # 100 KiB of shared memory
    k = Kernels("emulated", emulated(), "cpu")
    decode(k, step)
    before = torch.ops.attnkit_emulated.counts().split()
    for _ in range(3):
        decode(k, step)
    after = torch.ops.attnkit_emulated.counts().split()
    assert int(after[0]) == int(before[0]) + 3
    assert int(before[2]) > 0
    assert after[2] == before[2]


# Its tensors lie in memory that a process may touch only while one of its kernels runs.
HIDDEN = """
import mmap, sys, torch
sys.path.insert(0, {tests!r})
import cuda_kernels as t
from attnkit.spec import *

module, kept = t.emulated(), []

def hidden(x):
    if not isinstance(x, torch.Tensor):
        return x
    size = x.untyped_storage().nbytes()
    memory = mmap.mmap(-1, size)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    own = whole.view(x.dtype).as_strided(x.shape, x.stride()).copy_(x)
    torch.ops.attnkit_emulated.hide(whole)
    kept.append((memory, own))
    return own

case = t.Case((64, 64), (8, 2), 3, (70, 5), "bf16", "int8", 16, padded=True, keep=True, sinks=True,
              alibi="batch", splits=3)
q, k, v, args, spec, cache, _ = t.build(case)
args, cache = (type(a)(*map(hidden, a)) for a in (args, cache))
q, k, v, new, cos, sin = map(hidden, (
    q, k, v, torch.randn(2, 2, 2, 64).bfloat16(), torch.randn(96, 16), torch.randn(96, 16)))
rotary = RotaryTables(cos, sin)
module.decode(q, k, v, args, spec, cache, 3)
print("decode", flush=True)
module.forward(q, q, q, TensorArgs(sinks=args.sinks), spec)
print("forward", flush=True)
module.append(new, new, k, v, args.lengths, cache._replace(starts=None), rotary)
print("append", flush=True)
module.extend(q, new, new, k, v, args, spec, cache, rotary, 1)
print("extend", flush=True)
args.lengths.tolist()
print("a length was read")
"""


@pytest.mark.skipif(VARIANT != "plain" or bool(LIBRARY), reason="it needs no sanitizer")
def test_the_host_reads_nothing():
    """So that a call can be captured in a CUDA graph: its tensors are there for kernels only."""
    built("plain")
    script = HIDDEN.format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["decode", "forward", "append", "extend"], done.stderr
    assert done.returncode == -signal.SIGSEGV  # of the line that does read


def test_a_cuda_graph(kernels):
    """Captured once, replayed with other lengths, pages and numbers."""
    if kernels.device != "cuda":
        pytest.skip("only a GPU has CUDA graphs")
    first, second = (build(Case((64, 64), (8, 2), 3, n, page=16)) for n in ((70, 5), (9, 80)))
    on = [t.cuda() if isinstance(t, Tensor) else t for t in (*first[:3], first.args.lengths)]
    table = first.cache.block_table.cuda()
    spec = first.spec

    def call() -> tuple[Tensor, Tensor]:
        q, k, v, lengths = on
        return kernels.module.decode(
            q, k, v, TensorArgs(lengths=lengths), spec, CacheArgs(block_table=table)
        )

    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for step in (first, second):
        for old, new in zip(on, (*step[:3], step.args.lengths), strict=True):
            old.copy_(new)
        table.copy_(step.cache.block_table)
        graph.replay()
        want = call()
        assert torch.equal(captured[0], want[0])
        assert torch.equal(captured[1], want[1])
