"""The CPU kernels' bits: run to run, with any number of threads, in any batch, for any prefix."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attnkit import dispatch, testing
from attnkit.backends import cpu
from attnkit.spec import AttentionSpec, TensorArgs
from attnkit.testing import Case, Results

pytestmark = [
    pytest.mark.isa,
    pytest.mark.skipif(not cpu.BUILT, reason="attnkit was installed without its C++ extension"),
]
DTYPES = pytest.mark.parametrize("dtype", testing.DTYPES, ids=lambda d: str(d)[6:])


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def same(a: Results, b: Results, what: object) -> None:
    for name, x, y in zip(Results._fields, a, b, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert torch.equal(x, y), f"{what}: {name} differs by {(x - y).abs().max()}"


# All large enough for several threads, and long enough for several tasks per head.
THREADED = [
    Case("full", 1, 2, 2, 300, 300, 64),
    Case("causal", 2, 4, 2, 200, 200, 32, right=0),
    Case("one-head", 1, 1, 1, 700, 700, 32, right=0),
    Case("group", 1, 6, 1, 190, 300, 40, right=0, bottom_right=True),
    Case("padded", 5, 2, 2, 130, 130, 32, hide="lengths", sinks=True),
    Case("bias", 2, 4, 2, 150, 170, 32, bias="float:11qk", sinks=True),
    Case("bias-row", 3, 4, 4, 150, 170, 32, bias="float32:bh1k", alibi="head"),
    Case("dropout", 2, 4, 2, 150, 170, 32, dropout_p=0.3, softcap=3.0),
    Case("few-rows", 1, 1, 1, 17, 33, 512),  # one chunk of keys, and more rows than that to merge
    Case("packed", heads=4, kv_heads=2, dim=32, packed=((200, 150), (3, 4), (150, 260)), right=0),
]


@DTYPES
@pytest.mark.parametrize("case", THREADED, ids=str)
def test_threads_and_runs(case, dtype):
    x = testing.build(case, dtype)
    torch.set_num_threads(1)
    want = testing.run("cpu", x)
    for threads in (2, 3, 2, 5, 1):
        torch.set_num_threads(threads)
        same(testing.run("cpu", x), want, f"{threads} threads")


def alone(x: testing.Inputs, b: int) -> testing.Inputs:
    """Sequence b of a batch, by itself."""
    one = slice(b, b + 1)

    def take(t):
        return t if t is None or t.shape[0] == 1 else t[one]

    args = x.args
    args = args._replace(
        bias=args.bias if args.bias is None else args.bias[one],
        **{
            name: take(getattr(args, name))
            for name in ("keep", "lengths", "q_segments", "k_segments", "blocks", "alibi")
        },
    )
    return x._replace(q=x.q[one], k=x.k[one], v=x.v[one], args=args, dout=x.dout[one],
                      dlse=x.dlse[one])  # fmt: skip


BATCHED = [
    Case("full", 5, 4, 2, 70, 130, 32),
    Case("causal", 5, 4, 4, 130, 130, 32, right=0),
    Case("lengths", 5, 4, 2, 130, 200, 32, hide="lengths", right=20),
    Case("segments", 4, 2, 2, 130, 130, 32, hide="segments+keep", alibi="batch"),
    Case("bias", 4, 2, 1, 70, 130, 16, bias="float:b11k", softcap=3.0),
    Case("blocks", 4, 2, 1, 140, 130, 16, hide="blocks"),
    Case("one-query", 5, 8, 2, 1, 200, 64, right=0, bottom_right=True),
    Case("long", 3, 1, 1, 600, 600, 16, right=0),
]


@DTYPES
@pytest.mark.parametrize("case", BATCHED, ids=str)
def test_neighbours_in_the_batch(case, dtype):
    x = testing.build(case, dtype)
    torch.set_num_threads(3)
    whole = testing.run("cpu", x)
    for b in range(case.batch):
        torch.set_num_threads(1 + b % 2)
        got = testing.run("cpu", alone(x, b))
        for name in ("out", "lse", "dq", "dk", "dv"):
            a, w = getattr(got, name)[0], getattr(whole, name)[b]
            assert torch.equal(a, w), f"{name} of sequence {b} differs by {(a - w).abs().max()}"


@DTYPES
@pytest.mark.parametrize("threads", [1, 3])
def test_decoding(threads, dtype):
    """Threads and neighbours, for one and for several queries."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1500, 64, 1, 700, 1023], dtype=torch.int32)
    k, v = (torch.randn(5, 2, 1600, 64, generator=g).to(dtype) for _ in range(2))
    for queries in (1, 4, 40):
        q = torch.randn(5, 8, queries, 64, generator=g).to(dtype)
        spec = AttentionSpec(0.125, right=0, bottom_right=True)
        torch.set_num_threads(1)
        want = cpu.decode(q, k, v, TensorArgs(lengths=lengths), spec)
        torch.set_num_threads(threads)
        got = cpu.decode(q, k, v, TensorArgs(lengths=lengths), spec)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
        for n in range(5):
            one = slice(n, n + 1)
            got = cpu.decode(q[one], k[one], v[one], TensorArgs(lengths=lengths[one]), spec)
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b[one]), f"sequence {n} of {queries} queries"


PREFIXED = [
    Case("causal", 1, 2, 2, 200, 200, 64, right=0),
    Case("group", 1, 6, 2, 200, 200, 32, 48, right=0),
    Case("window", 1, 2, 1, 200, 200, 16, left=50, right=0),
    Case("alibi", 1, 2, 2, 200, 200, 40, right=0, alibi="head", softcap=3.0, sinks=True),
    Case("bias", 1, 2, 2, 200, 200, 16, right=0, bias="float:1hqk"),
    Case("low-bias", 1, 2, 2, 200, 200, 16, right=0, bias="float:1hqk", low=True),
    Case("keep", 2, 2, 1, 200, 200, 17, right=0, hide="keep"),
    Case("left", 3, 2, 1, 200, 200, 64, right=0, hide="left"),
    Case("dropout", 1, 2, 2, 200, 200, 16, right=0, dropout_p=0.2),
    Case("large", 1, 1, 1, 200, 200, 130, right=0),
    Case("bottom-right", 1, 2, 2, 200, 200, 24, right=0, bottom_right=True),
]
LENGTHS = [1, 2, 3, 5, 6, 7, 8, 12, 16, 17, 31, 32, 33, 48, 63, 64, 65, 90, 96, 97, 128, 130, 192]


@DTYPES
@pytest.mark.parametrize("case", PREFIXED, ids=str)
def test_prefixes(case, dtype):
    """The causal call on the first n queries and keys gives the bits of rows 0 to n - 1."""
    x = testing.build(case, dtype)
    out, lse = cpu.forward(*x[:5])
    for n in LENGTHS:
        args = x.args
        if args.bias is not None:
            args = args._replace(bias=args.bias[:, :, :n, :n])
        if args.keep is not None:
            args = args._replace(keep=args.keep[:, :n])
        q, k, v = (t[:, :, :n] for t in x[:3])
        if n % 2:  # strides are no excuse
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, s = cpu.forward(q, k, v, args, x.spec)
        assert torch.equal(o, out[:, :, :n]), f"out of the first {n} rows"
        assert torch.equal(s, lse[:, :, :n]), f"lse of the first {n} rows"


@DTYPES
@pytest.mark.parametrize("layout", ["transposed", "sliced", "inner2", "expanded"])
def test_strides(layout, dtype):
    case = Case("", 2, 4, 2, 70, 130, 33, right=40, layout=layout)
    x = testing.build(case, dtype)
    packed = x._replace(
        q=x.q.contiguous(), k=x.k.contiguous(), v=x.v.contiguous(), dout=x.dout.contiguous()
    )
    same(testing.run("cpu", x), testing.run("cpu", packed), layout)


def test_the_reference_repeats_itself():
    x = testing.build(Case("", 2, 4, 2, 70, 130, 16, dropout_p=0.2, sinks=True), torch.float32)
    same(testing.run("reference", x), testing.run("reference", x), "second run")


def test_several_python_threads():
    """Calls that overlap in one process do not disturb each other."""
    from concurrent.futures import ThreadPoolExecutor

    inputs = [
        testing.build(Case("", 1, 2, 1, 60 + 17 * n, 90, 32, right=30), torch.float32, seed=n)
        for n in range(4)
    ]
    want = [testing.run("cpu", x) for x in inputs]

    def work(n: int) -> Results:
        x = inputs[n % 4]
        out, lse = dispatch.BACKENDS["cpu"].forward(*x[:5])
        needs = (True, True, True, False, False)
        return Results(
            out, lse, *cpu.backward(x.dout, x.dlse, *x[:3], out, lse, x.args, x.spec, needs)
        )

    with ThreadPoolExecutor(4) as pool:
        for n, got in enumerate(pool.map(work, range(40))):
            same(got, want[n % 4], f"call {n}")
