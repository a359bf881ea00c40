"""Decoding: new queries on a long cache of each sequence's own length, against float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from attnkit import dispatch, testing
from attnkit.spec import AttentionSpec, TensorArgs
from attnkit.testing import Inputs, Results

DTYPES = pytest.mark.parametrize("dtype", testing.DTYPES, ids=lambda d: str(d)[6:])
pytestmark = pytest.mark.isa


class Step(NamedTuple):
    """One decoding step: k and v [B, Hkv, capacity, .] with NaN at and past lengths[b]."""

    q: Tensor
    k: Tensor
    v: Tensor
    args: TensorArgs
    spec: AttentionSpec


def build(
    lengths,
    queries=1,
    heads=(8, 2),
    dims=(64, 64),
    dtype=torch.float32,
    capacity=None,
    left=None,
    right=0,
    softcap=0.0,
    sinks=False,
    alibi="",
    padded=False,
    layout="plain",
    filler=math.nan,
):
    g = torch.Generator().manual_seed(1)
    (hq, hkv), (d, dv), b = heads, dims, len(lengths)
    room = max(lengths) + 3 if capacity is None else capacity
    q = torch.randn(b, hq, queries, d, generator=g, dtype=torch.float64).to(dtype)
    cache = []
    for n in (d, dv):
        # drawn at the longest length, so that the capacity does not change the numbers
        new = torch.randn(b, hkv, max(lengths), n, generator=g, dtype=torch.float64).to(dtype)
        if layout == "transposed":
            t = torch.full((b, room, hkv, n), filler, dtype=dtype).transpose(1, 2)
        elif layout == "inner2":
            t = torch.full((b, hkv, room, 2 * n), filler, dtype=dtype)[..., ::2]
        else:
            t = torch.full((b, hkv, room, n), filler, dtype=dtype)
        for i, length in enumerate(lengths):
            t[i, :, :length] = new[i, :, :length]
        cache.append(t)
    args = TensorArgs(lengths=torch.tensor(lengths, dtype=torch.int32))
    if padded:
        start = torch.tensor([min(3 * i, max(n - 1, 0)) for i, n in enumerate(lengths)])
        args = args._replace(keep=torch.arange(room) >= start[:, None])
    if sinks:
        acc = testing.accumulation_dtype(dtype)
        args = args._replace(sinks=torch.randn(hq, generator=g, dtype=torch.float64).to(acc))
    if alibi:
        rows = b if alibi == "batch" else 1
        args = args._replace(alibi=0.01 + 0.05 * torch.rand(rows, hq, generator=g))
    spec = AttentionSpec(
        d**-0.5 if d else 1.0, left=left, right=right, bottom_right=True, softcap=softcap
    )
    return Step(q, *cache, args, spec)


def decode(backend, step):
    module = dispatch.BACKENDS[backend]
    assert module.supports_decode(*step) is None
    with testing.poisoned_memory():
        return Results(*module.decode(*step))


def check(backend, step, what=""):
    """Each sequence of the batch against the full call on its valid keys."""
    got = decode(backend, step)
    (b, hq, n, _), dv = step.q.shape, step.v.shape[3]
    assert got.out.shape == (b, hq, n, dv)
    assert got.lse.shape == (b, hq, n)
    for i, length in enumerate(step.args.lengths.tolist()):
        args = step.args._replace(lengths=None)
        if args.keep is not None:
            args = args._replace(keep=args.keep[i : i + 1, :length])
        if args.alibi is not None and len(args.alibi) > 1:
            args = args._replace(alibi=args.alibi[i : i + 1])
        k, v = (t[i : i + 1, :, :length] for t in (step.k, step.v))
        out, lse = got.out[i : i + 1], got.lse[i : i + 1]
        x = Inputs(step.q[i : i + 1], k, v, args, step.spec, torch.zeros_like(out), lse * 0)
        testing.check(Results(out, lse), testing.expect(x, gradients=False), f"{what} {i}")


OPTIONS = {
    "plain": {},
    "one-head": {"heads": (1, 1)},
    "mha": {"heads": (3, 3)},
    "mqa": {"heads": (7, 1)},
    "wide-group": {"heads": (40, 1)},
    "window": {"left": 40},
    "narrow-window": {"left": 0},
    "not-causal": {"right": None, "queries": 3},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": "head"},
    "alibi-batch": {"alibi": "batch", "queries": 2},
    "left-padding": {"padded": True},
    "two": {"queries": 2},
    "five": {"queries": 5, "padded": True, "left": 100},
    "thirty": {"queries": 30, "sinks": True, "alibi": "head"},
    "sixty-five": {"queries": 65},
    "small-dim": {"dims": (8, 8)},
    "odd-dims": {"dims": (33, 79)},
    "large-dims": {"dims": (128, 256)},
    "transposed": {"layout": "transposed", "queries": 2},
    "inner2": {"layout": "inner2"},
    "everything": {"left": 90, "softcap": 4.0, "sinks": True, "alibi": "batch", "padded": True,
                   "queries": 3, "layout": "transposed", "dims": (40, 24)},
}  # fmt: skip


@DTYPES
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_contract(backend, options, dtype):
    check(backend, build((200, 1, 65, 131), dtype=dtype, **options))


@DTYPES
def test_long_cache(backend, dtype):
    """Long enough that the keys are split among threads and merged."""
    check(backend, build((3000, 2047), heads=(4, 1), dtype=dtype))
    check(backend, build((3000, 2047), heads=(4, 1), dtype=dtype, queries=3, left=1500))


@pytest.mark.parametrize("length", [*range(1, 20), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257])
def test_every_length(backend, length):
    check(backend, build((length,), heads=(2, 1), dims=(16, 16), capacity=300), length)


def test_empty_sequences_and_queries_before_the_first_key(backend):
    step = build((0, 2, 9), queries=4, heads=(4, 2), dims=(16, 8))
    check(backend, step)
    got = decode(backend, step)
    assert (got.out[0] == 0).all()
    assert (got.lse[0] == -math.inf).all()
    assert (got.lse[1, :, :2] == -math.inf).all()  # at positions -2 and -1
    assert got.lse[1, :, 2:].isfinite().all()


@pytest.mark.parametrize("filler", [math.nan, math.inf, 1e30])
def test_nothing_past_the_length_counts(backend, filler):
    lengths = (70, 1, 130, 64)
    clean = decode(backend, build(lengths, queries=2, filler=0.0))
    got = decode(backend, build(lengths, queries=2, filler=filler))
    assert torch.equal(got.out, clean.out)
    assert torch.equal(got.lse, clean.lse)


def test_hidden_by_keep_does_not_count(backend):
    step = build((70, 66, 130), queries=2, padded=True)
    bad = ~step.args.keep[:, None, :, None]
    assert bad.any()
    clean = decode(
        backend, step._replace(k=step.k.masked_fill(bad, 0), v=step.v.masked_fill(bad, 0))
    )
    got = decode(backend, step._replace(k=step.k.masked_fill(bad, math.nan),
                                        v=step.v.masked_fill(bad, math.nan)))  # fmt: skip
    assert torch.equal(got.out, clean.out)
    assert torch.equal(got.lse, clean.lse)


def test_spare_room_changes_nothing(backend):
    """To the bit, however much room the cache has left."""
    small, large = (build((200, 65), queries=2, capacity=c) for c in (200, 900))
    a, b = decode(backend, small), decode(backend, large)
    if backend == "reference":  # its matrix products depend on the number of columns
        torch.testing.assert_close(a.out, b.out)
    else:
        assert torch.equal(a.out, b.out)
        assert torch.equal(a.lse, b.lse)


def test_steps_of_one_equal_several_at_once(backend):
    """Query t of n sees what it saw when it was the newest."""
    whole = build((90, 40), queries=4)
    got = decode(backend, whole)
    for t in range(4):
        lengths = whole.args.lengths - (3 - t)
        one = whole._replace(q=whole.q[:, :, t : t + 1], args=TensorArgs(lengths=lengths))
        torch.testing.assert_close(decode(backend, one).out[:, :, 0], got.out[:, :, t])


def test_sizes_of_zero(backend):
    for step in (
        build((5, 3), heads=(0, 0)),
        build((5, 3), queries=0),
        build((5, 3), dims=(0, 4)),
        build((5, 3), dims=(4, 0)),
        build((0, 0), capacity=0),
    ):
        check(backend, step)


def test_offsets_past_two_to_the_31(backend):
    near = build((40,), heads=(4, 2), dims=(16, 16), dtype=torch.bfloat16)
    wide = [testing.far_heads(t) for t in (near.k, near.v)]
    module = dispatch.BACKENDS[backend]
    got = module.decode(near.q, *wide, near.args, near.spec)
    assert torch.equal(got[0], decode(backend, near).out)
