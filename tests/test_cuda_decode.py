"""Queries over a cache: one set of cases for the CPU kernels, the CUDA kernels in an emulator (in
three orders of blocks, and under sanitizers), and the CUDA kernels on a GPU; all against float64.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import testing
from attnkit.backends import cuda, reference
from attnkit.nn import RotaryEmbedding
from attnkit.spec import CacheArgs, RotaryTables, TensorArgs
from attnkit.testing import Inputs, Results

sys.path.insert(0, str(Path(__file__).parent))
import cuda_sanitizers
from cuda_kernels import (
    DTYPES,
    LIBRARY,
    PLACES,
    STORED,
    VARIANT,
    Case,
    Kernels,
    build,
    check,
    choose,
    decode,
    emulated,
    refused,
    say,
    skip_what_is_not_planted,
)  # fmt: skip


@pytest.fixture(params=PLACES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return choose(request.param)


@pytest.fixture(scope="module", autouse=True)
def _around(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sanitizers have a core of their own meanwhile; afterwards says what the emulator has run."""
    if any(Path(item.path).name == "test_cuda_sanitizers.py" for item in request.session.items):
        cuda_sanitizers.start()
    yield
    if emulated.cache_info().currsize:
        launches, threads, _ = torch.ops.attnkit_emulated.counts().split()
        say(request, f"CUDA emulator ({VARIANT}): {launches} launches, {threads} CUDA threads")


# Lengths 0 and 1, and one below, at and above the ends of pages, of tiles (64) and of splits (256).
LENGTHS = [(0, 1, 2), (7, 8, 9), (15, 16, 17), (31, 32, 33), (63, 64, 65), (127, 128, 129),
           (255, 256, 257), (40, 513, 0)]  # fmt: skip
AXES: dict[str, list[Any]] = {
    "lengths": LENGTHS,
    "heads": [(2, 2), (4, 1), (7, 1), (8, 1), (6, 2)],
    "queries": [1, 2, 5, 17],
    "kind": ["bf16", "fp16", "fp32", "bf16 int8", "fp16 fp8", "fp32 int8", "bf16 fp8"],
    "page": [None, 8, 16, 24, 64, 256],
    "left": [None, 0, 20, 70],
    "splits": [0, 1, 3, -1],
    "more": ["", "padded", "keep", "softcap", "sinks alibi", "padded right slots"],
    "dims": [(64, 64), (192, 128)],
}


def _cases() -> list[Case]:
    found = []
    for row in testing.pairwise(AXES):
        kind, more = row.pop("kind").split(), row.pop("more")
        case = Case(**row, dtype=kind[0], stored=kind[1] if len(kind) > 1 else None)
        found.append(case._replace(
            padded="padded" in more, keep="keep" in more, softcap=2.0 * ("softcap" in more),
            sinks="sinks" in more, alibi="batch" if "alibi" in more else "",
            right=None if "right" in more else 0,
            memory="slots first" if "slots" in more else "heads first"))  # fmt: skip
    return found


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_contract(kernels, case):
    check(kernels, case)


@pytest.mark.parametrize("dims", sorted(cuda._HEAD_DIMS), ids=str)
@pytest.mark.parametrize("kind", ["bf16", "fp16 int8", "fp32", "bf16 fp8"])
@pytest.mark.parametrize("queries", [1, 5, 40])
def test_head_dims(kernels, dims, kind, queries):
    if VARIANT != "plain" or LIBRARY:
        pytest.skip("these kernels have fewer head dims")
    dtype, stored = (*kind.split(), None)[:2]
    kernels = kernels._replace(orders=kernels.orders[-1:])
    check(kernels, Case(dims, (2, 1), queries, (70, 130), dtype, stored, 16, left=60))


# ---------------------------------------------------------------- what must not matter


@pytest.mark.parametrize("stored", [None, *STORED])
@pytest.mark.parametrize("queries", [1, 3, 16])
def test_pages_room_and_batch_change_no_bit(kernels, queries, stored):
    kernels = kernels._replace(orders=(0,))
    case = Case((64, 64), (8, 2), queries, (70, 300, 7), stored=stored, padded=True)
    want = decode(kernels, build(case))
    for page in (8, 100, 256):
        got = decode(kernels, build(case._replace(page=page, memory="slots first")))
        assert torch.equal(got.out, want.out)
        assert torch.equal(got.lse, want.lse)
    step = build(case)
    for i in range(3):
        one = [t if t is None or t.shape[0] != 3 else t[i : i + 1] for t in step.cache]
        got = decode(
            kernels,
            step._replace(
                q=step.q[i : i + 1],
                k=step.k[i : i + 1],
                v=step.v[i : i + 1],
                args=step.args._replace(lengths=step.args.lengths[i : i + 1]),
                cache=CacheArgs(*one),
            ),
        )
        assert torch.equal(got.out[0], want.out[i])
        assert torch.equal(got.lse[0], want.lse[i])


@pytest.mark.parametrize("kind", ["bf16", "fp32", "bf16 int8", "fp32 fp8"])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (8, 1)])
def test_hidden_keys_may_hold_anything(kernels, heads, kind):
    """Hidden from all queries, or from some of them by the band: no NaN comes through."""
    dtype, stored = (*kind.split(), None)[:2]
    case = Case((64, 64), heads, 6, (70, 130), dtype, stored, 16, padded=True, keep=True)
    clean, step = decode(kernels, build(case)), build(case)
    starts = step.cache.starts.tolist()
    bad = step._replace(k=step.k.clone(), v=step.v.clone(), cache=CacheArgs(
        *(None if t is None else t.clone() for t in step.cache)))  # fmt: skip
    for i in range(2):
        for slot in range(case.lengths[i]):
            if slot >= starts[i] and step.args.keep[i, slot]:
                continue
            page, row = int(step.cache.block_table[i, slot // 16]), slot % 16
            if stored is None:
                bad.k[page, :, row], bad.v[page, :, row] = math.nan, math.inf
            else:
                bad.cache.k_scale[page, :, row] = bad.cache.v_scale[page, :, row] = math.nan
    got = decode(kernels, bad)
    assert torch.equal(got.out, clean.out)
    assert torch.equal(got.lse, clean.lse)


BAD = [(kind, bad) for kind in ("bf16", "fp16", "fp32") for bad in (math.nan, math.inf, -math.inf)]
BAD += [("fp32 fp8", math.nan), ("bf16 fp8", math.nan)]  # float8_e4m3fn has no infinity


@pytest.mark.parametrize(("kind", "bad"), BAD)
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (16, 1)])
def test_a_value_reaches_those_who_see_it_and_no_others(kernels, heads, kind, bad):
    """The last key but one is seen by the last two queries; a value of it is not finite."""
    dtype, stored = (*kind.split(), None)[:2]
    every_order = kernels
    for length in (40, 64, 65, 130) if VARIANT == "plain" else (65,):
        kernels = every_order if length == 65 else every_order._replace(orders=(0,))
        case = Case((64, 64), heads, 5, (length,), dtype, stored)
        step, clean = build(case), decode(kernels, build(case))
        v = step.v.clone()
        if stored:
            v[0, 0, length - 2].view(torch.uint8)[9] = 0x7F
        else:
            v[0, 0, length - 2, 9] = bad
        got = decode(kernels, step._replace(v=v)).out
        if kernels.name == "cpu":  # another way of adding up, with its own rounding, for such keys
            assert got[:, :, :3].isfinite().all()
            continue
        assert torch.equal(got[:, :, :3], clean.out[:, :, :3])
        spoilt = got[:, :, 3:, 9]
        assert (spoilt.isnan() if math.isnan(bad) else spoilt == bad).all()
        assert torch.equal(got[:, :, 3:, :9], clean.out[:, :, 3:, :9])
        assert torch.equal(got[:, :, 3:, 10:], clean.out[:, :, 3:, 10:])


def test_nan_in_a_visible_key_spoils_its_rows(kernels):
    case = Case((64, 64), (4, 2), 3, (70,))
    step, clean = build(case), decode(kernels, build(case))
    k = step.k.clone()
    k[0, 1, 68] = math.nan  # head 1 of 2; seen by the last two queries
    got = decode(kernels, step._replace(k=k))
    assert got.out[0, 2:, 1:].isnan().all()
    assert got.lse[0, 2:, 1:].isnan().all()
    assert torch.equal(got.out[0, :2], clean.out[0, :2])
    assert torch.equal(got.out[0, :, 0], clean.out[0, :, 0])


def test_queries_before_the_first_key(kernels):
    for dtype in DTYPES:
        got = decode(kernels, build(Case((64, 64), (4, 2), 4, (0, 2, 9), dtype)))
        assert (got.out[0] == 0).all()
        assert (got.lse[0] == -math.inf).all()
        assert (got.lse[1, :, :2] == -math.inf).all()
        assert got.lse[1, :, 2:].isfinite().all()


def test_rows_of_a_cache_by_index(kernels):
    case = Case((64, 64), (4, 2), 2, (70, 5, 66, 40))
    step = build(case)
    index = torch.tensor([2, 0, 2], dtype=torch.int32)
    rows = index.long()
    lengths = step.args._replace(lengths=step.args.lengths[rows])
    want = decode(
        kernels, step._replace(q=step.q[:3], k=step.k[rows], v=step.v[rows], args=lengths)
    )
    got = decode(
        kernels, step._replace(q=step.q[:3], args=lengths, cache=CacheArgs(None, None, index))
    )
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def test_many_splits_and_their_number(kernels):
    """More splits than keys; a number that is asked for; as many as fill the machine."""
    if kernels.name == "cpu":
        pytest.skip("the CPU kernels have one rule")
    case = Case((64, 64), (8, 1), 1, (700, 3))
    for splits in (1, 2, 7, 128, 0, -1):
        check(kernels, case._replace(splits=splits))
    with pytest.raises(RuntimeError, match="splits is 129, expected -1 to 128"):
        decode(kernels, build(case), 129)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("page", [-1, 9, 10**6])
def test_pages_out_of_range_are_refused(kernels, page):
    step = build(Case(lengths=(40, 20), page=16))
    table = step.cache.block_table.clone()
    table[0, 1] = page
    bad = step._replace(cache=step.cache._replace(block_table=table))
    refused(kernels, lambda: decode(kernels, bad), "no such page|block_table.*expected 0 to 8")


def test_rows_and_lengths_out_of_range_are_refused(kernels):
    step = build(Case(lengths=(40, 20)))
    for row in (-1, 2):
        index = torch.tensor([0, row], dtype=torch.int32)
        bad = step._replace(cache=CacheArgs(None, None, index))
        refused(
            kernels, lambda bad=bad: decode(kernels, bad), "no such page|batch_index.*expected 0"
        )
    for length in (-1, 44):
        lengths = torch.tensor([length, 20], dtype=torch.int32)
        bad = step._replace(args=step.args._replace(lengths=lengths))
        refused(kernels, lambda bad=bad: decode(kernels, bad), "more tokens than|lengths.0. asks")


def test_what_the_operators_refuse():
    module, step = emulated(), build(Case())
    q, k, v, args, spec = step[:5]
    for bad, text in [
        ((q.double(), k, v), "q has dtype Double, expected Float, BFloat16 or Half"),
        (
            (q, k[..., :32], v),
            r"q \[2, 4, 1, 64\], k \[2, 2, 73, 32\] and v .* do not fit",
        ),
        ((q[..., :48], k[..., :48].contiguous(), v), "no CUDA kernel for these head dims"),
        ((q, k[0], v), r"k has shape \[2, 73, 64\], expected 4 dimensions"),
        ((q, k[:1], v[:1]), "has 1 rows, expected 2"),
        ((q, k.float(), v.float()), "q is BFloat16, k Float and v Float, dtypes that do not fit"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            module.decode(*bad, args, spec)
    ones = torch.ones(3)
    for change, text in [
        ({"bias": q.new_zeros(2, 4, 1, 73)}, "bias is given, expected none"),
        ({"q_segments": ones}, "q_segments is given, expected none"),
        ({"blocks": ones}, "blocks is given, expected none"),
        ({"sinks": ones}, r"sinks has shape \[3\], expected \[4\]"),
        ({"alibi": ones[None]}, r"alibi has shape \[1, 3\], expected \[1 or 2, 4\]"),
        ({"keep": ones.bool()}, r"keep has shape \[3\], expected \[2, 73\]"),
        ({"lengths": ones.int()}, r"lengths has shape \[3\], expected \[2\]"),
        ({"lengths": args.lengths.long()}, "lengths has dtype Long, expected Int"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            module.decode(q, k, v, args._replace(**change), spec)
    with pytest.raises(RuntimeError, match=r"dropout_p is 0\.1, expected 0"):
        module.decode(q, k, v, args, spec._replace(dropout_p=0.1))
    table = torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"block_table has shape \[3, 1\], expected \[2, pages"):
        module.decode(q, k, v, args, spec, CacheArgs(block_table=table))


def test_supports_says_why():
    module, step = emulated(), build(Case())
    q, k, v, args, spec = step[:5]
    assert module.supports_decode(q, k, v, args, spec) is None
    wide = torch.zeros(*k.shape[:3], 66, dtype=k.dtype)[..., :64]
    for call, text in [
        ((q.double(), k, v, args, spec), "dtype torch.float64"),
        ((q, k.float(), v.float(), args, spec), "keys are torch.float32"),
        ((q[..., :40], k[..., :40], v, args, spec), "head dims 40 and 64"),
        ((q, wide, v, args, spec), "multiples of 16 bytes"),
        ((q, k, v, args._replace(bias=q), spec), "a bias"),
        ((q, k, v, args._replace(q_segments=q), spec), "segments"),
        ((q, k, v, args, spec._replace(dropout_p=0.1)), "dropout"),
        ((q.to("meta"), k, v, args, spec), "query is on meta"),
    ]:
        assert re.search(text, module.supports_decode(*call) or "")
    x = torch.randn(1, 1, 2, 64, requires_grad=True)
    assert "gradient" in (module.supports(x, x, x, TensorArgs(), spec) or "")
    with torch.no_grad():
        assert module.supports(x, x, x, TensorArgs(), spec) is None
    if not cuda.BUILT:
        assert "without its CUDA extension" in (cuda.supports(q, k, v, args, spec) or "")


# ---------------------------------------------------------------- attention without a cache

PLAIN = {
    "causal": {"queries": 40, "keys": 40, "right": 0},
    "causal, bottom right": {"queries": 17, "keys": 70, "right": 0, "bottom_right": True},
    "more queries than keys": {"queries": 70, "keys": 40, "right": 0, "bottom_right": True},
    "no mask": {"queries": 5, "keys": 130},
    "padding": {"queries": 20, "keys": 70, "hide": "lengths"},
    "left padding": {"queries": 20, "keys": 70, "hide": "left", "right": 0},
    "window": {"queries": 70, "keys": 70, "left": 20, "right": 5, "alibi": "head"},
    "sinks": {"queries": 3, "keys": 40, "sinks": True, "softcap": 2.0, "layout": "transposed"},
    "one query": {"queries": 1, "keys": 300, "layout": "sliced"},
    "no keys": {"queries": 2, "keys": 0, "sinks": True},
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN)
def test_attention(kernels, options, dtype):
    case = testing.Case("plain", 2, 4, 2, dim=64, **options)
    x, want = testing.expected(case, DTYPES[dtype])
    skip_what_is_not_planted(x.q)
    if kernels.device == "cuda":
        x = Inputs(*(t.cuda() for t in x[:3]), TensorArgs(
            *(None if t is None else t.cuda() for t in x.args)), *x[4:])  # fmt: skip
    with torch.no_grad():
        assert kernels.module.supports(x.q, x.k, x.v, x.args, x.spec) is None
        got = kernels.run(lambda: kernels.module.forward(x.q, x.k, x.v, x.args, x.spec))
    testing.check(Results(*(t.cpu() for t in got)), testing.expect(x._replace(), gradients=False)
                  if kernels.device == "cpu" else want)  # fmt: skip


# ---------------------------------------------------------------- append


@pytest.mark.parametrize("rotary", [None, "halves", "interleaved"])
@pytest.mark.parametrize("stored", [None, *STORED])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [None, 8])
def test_append(kernels, dtype, stored, rotary, page):
    """What lies in the slots afterwards, and that nothing else has changed."""
    b, h, n, (d, dv) = 3, 2, 11, (64, 40)
    kept = DTYPES[dtype] if stored is None else STORED[stored]
    g = torch.Generator().manual_seed(4)
    k = torch.randn(b, h, n, d, generator=g).to(DTYPES[dtype])
    v = torch.randn(b, n, h, dv, generator=g).to(DTYPES[dtype]).transpose(1, 2)
    k[0, 0, 3] = 0
    lengths, size = torch.tensor([0, 7, 29], dtype=torch.int32), page or 40
    count = 20 if page else 5
    table = torch.randperm(20, generator=g)[:15].view(3, 5).int() if page else None
    index = None if page else torch.tensor([4, 0, 3], dtype=torch.int32)
    rope = RotaryEmbedding(d, 48, interleaved=rotary == "interleaved")
    tables = RotaryTables()
    if rotary:
        tables = RotaryTables(*rope.tables(torch.arange(64), torch.float32), rope.interleaved)

    before = [torch.full((count, h, size, w), 7.0).to(kept) for w in (d, dv)]
    scales_before = [None if stored is None else torch.full((count, h, size), 7.0) for _ in "kv"]
    on = kernels.device

    def call() -> list[Tensor]:
        caches = [t.clone().to(on) for t in before]
        scales = [None if t is None else t.clone().to(on) for t in scales_before]
        where = CacheArgs(None, *(None if t is None else t.to(on) for t in (table, index)), *scales)
        turned = RotaryTables(*(None if t is None else t.to(on) for t in tables[:2]), tables[2])
        kernels.module.append(k.to(on), v.to(on), *caches, lengths.to(on), where, turned)
        return [t.float() if stored == "fp8" else t for t in caches] + [
            t for t in scales if t is not None
        ]

    got = [t.cpu() for t in kernels.run(call)]
    slots = lengths.long()[:, None] + torch.arange(n)
    rows = slots % size
    pages = table.long().gather(1, slots // size) if page else index.long()[:, None].expand(-1, n)
    turned = rope(k.double(), slots) if rotary else k.double()
    for i, want in enumerate((turned, v.double())):
        new = got[i].double()[pages, :, rows].transpose(1, 2)
        if stored is None:
            torch.testing.assert_close(new.to(kept), want.to(kept), rtol=1e-2, atol=1e-5)
            if dtype == "fp32":
                torch.testing.assert_close(new, want, rtol=1e-5, atol=1e-5)
        else:
            factor = got[2 + i][pages, :, rows].transpose(1, 2)[..., None].double()
            largest = 127 if stored == "int8" else 448
            top = want.abs().amax(-1)
            torch.testing.assert_close(factor[..., 0] * largest, top, rtol=1e-5, atol=1e-6)
            step = factor / 2 if stored == "int8" else (want.abs() / 16).clamp(min=factor * 2**-10)
            assert ((new * factor - want).abs() <= step * 1.001 + 1e-6).all()
        untouched = torch.ones(count, size, dtype=torch.bool)
        untouched[pages, rows] = False
        a, c = (x.float().transpose(1, 2)[untouched] for x in (got[i], before[i]))
        assert torch.equal(a, c)


@pytest.mark.parametrize("stored", STORED)
def test_rounding(kernels, stored):
    """To the bit what the reference stores: ties to even, NaN and infinity, subnormals, zero."""
    rows = torch.cat((torch.linspace(-448, 448, 895), torch.arange(-127, 128) / 2,
                      torch.arange(-40, 41) / 2048, torch.zeros(1))).view(-1, 8)  # fmt: skip
    odd = torch.tensor([[math.nan], [math.inf], [-math.inf], [0.0]]).expand(4, 8).clone()
    odd[:3, 1:] = 1.0
    x = torch.cat((rows, odd))[:, None, None]
    want, scale = reference.quantise(x, STORED[stored])

    def call() -> tuple[Tensor, ...]:
        k, v = (torch.zeros(x.shape, device=kernels.device).to(STORED[stored]) for _ in range(2))
        scales = [torch.ones(len(x), 1, 1, device=kernels.device) for _ in range(2)]
        new, lengths = x.to(kernels.device), torch.zeros(len(x), device=kernels.device).int()
        kernels.module.append(new, -new, k, v, lengths, CacheArgs(None, None, None, *scales))
        return k.view(torch.uint8), v.view(torch.uint8), *scales

    k, v, k_scale, v_scale = (t.cpu() for t in kernels.run(call))
    good = scale.isfinite()
    torch.testing.assert_close(k_scale, scale, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(v_scale, scale, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(k[good], want[good].view(torch.uint8))
    opposite = reference.quantise(-x, STORED[stored])[0]
    assert torch.equal(v[good], opposite[good].view(torch.uint8))


def test_append_refuses(kernels):
    k = torch.ones(2, 1, 3, 64)
    cache = [torch.zeros(2, 1, 8, 64) for _ in range(2)]
    for lengths in ([0, 6], [-1, 0]):
        full = torch.tensor(lengths, dtype=torch.int32)
        refused(kernels, lambda full=full: kernels.module.append(k, k, *cache, full),
                 "no room for its new tokens|lengths.[01]. asks")  # fmt: skip
    empty, index = torch.zeros(2, dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    where = CacheArgs(None, None, index)
    refused(kernels, lambda: kernels.module.append(k, k, *cache, empty, where),
             "no such page|expected 0 to 1")  # fmt: skip
    short = torch.ones(2, 32)
    refused(kernels, lambda: kernels.module.append(
        k, k, *cache, empty, CacheArgs(), RotaryTables(short, short)), "positions")  # fmt: skip
