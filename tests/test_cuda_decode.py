"""Queries over a cache: one set of cases for the CPU kernels, the CUDA kernels in an emulator (in
three orders of blocks, and under sanitizers), and the CUDA kernels on a GPU; all against float64.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from attnkit import testing
from attnkit.backends import cpu, cuda, reference
from attnkit.nn import RotaryEmbedding
from attnkit.spec import AttentionSpec, CacheArgs, RotaryTables, TensorArgs
from attnkit.testing import Inputs, Results

BUILD = Path(__file__).parent / "cuda_emulator" / "build.py"
# Set in the process that test_sanitizers starts: "asan" or "tsan", with fewer head dims.
VARIANT = os.environ.get("CUDA_EMULATOR", "plain")
# Set by cuda_mutants.py: kernels with a bug in them, of head dim 64 only and without fp16.
LIBRARY = os.environ.get("CUDA_EMULATOR_LIBRARY")
STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


# ---------------------------------------------------------------- where the kernels run


class Kernels(NamedTuple):
    """One way of running the kernels: a backend module, its device, and orders to repeat it in."""

    name: str
    module: ModuleType
    device: str
    orders: tuple[int, ...] = (0,)

    def run(self, call: Callable[[], Any]) -> Any:
        """The result of a call, which must be the same in every order, to the bit."""
        results = []
        for order in self.orders:
            if self.name == "emulated":
                torch.ops.attnkit_emulated.set_order(order)
            with testing.poisoned_memory():
                results.append(call())
        for other in results[1:]:
            assert all(
                torch.equal(a, b) or _same(a, b) for a, b in zip(other, results[0], strict=True)
            )
        return results[0]


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan())


def built(variant: str) -> str:
    """The path of the emulated operators."""
    command = [sys.executable, str(BUILD), "kernels", variant]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip(f"the emulator: {done.stdout.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@cache
def emulated() -> ModuleType:
    """attnkit.backends.cuda over the operators that run in the emulator, on CPU tensors."""
    if "attnkit_emulated" in sys.modules:
        return sys.modules["attnkit_emulated"]
    torch.ops.load_library(LIBRARY or built(VARIANT))
    # a copy of a name of its own: torch.compile looks names up in sys.modules
    spec = importlib.util.spec_from_file_location("attnkit_emulated", str(cuda.__file__))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.OPERATORS, module.DEVICE, module.BUILT = torch.ops.attnkit_emulated, "cpu", True
    return module


@pytest.fixture(params=["cpu", "emulated", "gpu"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    name = request.param
    if name == "emulated":
        return Kernels(name, emulated(), "cpu", (0, 1, 7) if VARIANT == "plain" else (0,))
    if VARIANT != "plain":
        pytest.skip("only the emulated kernels are sanitized")
    if name == "cpu":
        if not cpu.BUILT:
            pytest.skip("cpu: attnkit was installed without its C++ extension")
        return Kernels(name, cpu, "cpu")
    if not (cuda.BUILT and torch.cuda.is_available()):
        pytest.skip("gpu: there is no GPU, or attnkit was installed without its CUDA extension")
    return Kernels(name, cuda, "cuda")


# ---------------------------------------------------------------- cases


class Case(NamedTuple):
    dims: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (4, 2)
    queries: int = 1
    lengths: tuple[int, ...] = (70, 5)
    dtype: str = "bf16"
    stored: str | None = None
    page: int | None = None
    memory: str = "heads first"
    left: int | None = None
    right: int | None = 0
    padded: bool = False  # starts
    keep: bool = False
    softcap: float = 0.0
    sinks: bool = False
    alibi: str = ""
    splits: int = 0

    def __str__(self) -> str:
        said = [f"{name}={value}" for name, value in self._asdict().items()
                if value != Case._field_defaults[name]]  # fmt: skip
        return ",".join(said).replace(" ", "") or "plain"


class Step(NamedTuple):
    """A case in memory, and what its sequences are by themselves."""

    q: Tensor
    k: Tensor
    v: Tensor
    args: TensorArgs
    spec: AttentionSpec
    cache: CacheArgs
    alone: list[tuple[Tensor, Tensor, Tensor]]  # key, value in float64 [1, Hkv, S, .], keep or none


def _pages(t: Tensor, size: int, ids: Tensor, count: int, filler: float, memory: str) -> Tensor:
    """[B, Hkv, S, ...] in the pages `ids` [B, W] of [count, Hkv, size, ...], among foreign ones."""
    out = torch.full((count, t.shape[1], size, *t.shape[3:]), filler).to(t.dtype)
    if memory == "slots first":
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    for b, row in enumerate(ids.tolist()):
        for j, page in enumerate(row):
            part = t[b, :, j * size : (j + 1) * size]
            out[page, :, : part.shape[1]] = part
    return out


@cache
def build(case: Case) -> Step:
    g = torch.Generator().manual_seed(2)
    b, n, (hq, hkv), (d, dv) = len(case.lengths), case.queries, case.heads, case.dims
    dtype = DTYPES[case.dtype]
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    size = case.page or max(*case.lengths, 1) + 3
    width = max(-(-max(case.lengths) // size), 1)
    room = width * size
    q = torch.randn(b, hq, n, d, generator=g).to(dtype)
    past = torch.arange(room) >= lengths[:, None]  # [B, room]
    memory, values, scales = [], [], []
    for dim in (d, dv):
        # drawn at the longest length, so that the capacity does not change the numbers
        t = torch.randn(b, hkv, max(case.lengths), dim, generator=g).to(dtype)
        t = torch.nn.functional.pad(t, (0, 0, 0, room - max(case.lengths)))
        if case.stored is None:
            values.append(t.double())
            memory.append(t.masked_fill(past[:, None, :, None], math.nan))
            scales.append(None)
            continue
        t, scale = reference.quantise(t, STORED[case.stored])
        values.append(t.double() * scale.double()[..., None])
        memory.append(t)
        scales.append(scale.masked_fill(past[:, None], math.nan))
    starts = torch.tensor([min(3 * i + 1, max(x - 1, 0)) for i, x in enumerate(case.lengths)]).int()
    keep = torch.rand(b, room, generator=g) < 0.7
    args = TensorArgs(lengths=lengths)
    if case.keep:
        args = args._replace(keep=keep)
    if case.sinks:
        args = args._replace(sinks=torch.randn(hq, generator=g))
    if case.alibi:
        rows = b if case.alibi == "batch" else 1
        args = args._replace(alibi=0.01 + 0.05 * torch.rand(rows, hq, generator=g))
    spec = AttentionSpec(d**-0.5, case.left, case.right, True, case.softcap)
    alone = []
    for i, length in enumerate(case.lengths):
        first = int(starts[i]) if case.padded else 0
        own = [t[i : i + 1, :, first:length] for t in values]
        alone.append((*own, keep[i : i + 1, first:length]))
    where = CacheArgs(starts if case.padded else None)
    if case.page is None:
        where = where._replace(k_scale=scales[0], v_scale=scales[1])
        return Step(q, *memory, args, spec, where, alone)
    count = b * width + 3
    ids = torch.randperm(count, generator=g)[: b * width].view(b, width)
    memory = [_pages(t, size, ids, count, 1 if case.stored == "int8" else math.nan, case.memory)
              for t in memory]  # fmt: skip
    scales = [
        None if t is None else _pages(t, size, ids, count, math.nan, case.memory) for t in scales
    ]
    # what no length needs is an id that must never be looked at
    needed = torch.arange(width) < -(-lengths // size)[:, None]
    table = torch.where(needed, ids, 10**6).int()
    return Step(q, *memory, args, spec, where._replace(
        block_table=table, k_scale=scales[0], v_scale=scales[1]), alone)  # fmt: skip


@cache
def expected(case: Case) -> list[testing.Expected]:
    """The truth of each sequence by itself, and how far from it a result may be."""
    step, found = build(case), []
    for i, (k, v, keep) in enumerate(step.alone):
        q = step.q[i : i + 1]
        args = step.args._replace(lengths=None, keep=keep if case.keep else None)
        if args.alibi is not None and len(args.alibi) > 1:
            args = args._replace(alibi=args.alibi[i : i + 1])
        none = q.new_zeros(1, *q.shape[1:3], v.shape[3])
        x = Inputs(q, k, v, args, step.spec, none, torch.zeros(none.shape[:3]))
        found.append(testing.expect(x, gradients=False))
    return found


def skip_what_is_not_planted(q: Tensor) -> None:
    if LIBRARY and (q.dtype == torch.float16 or q.shape[3] != 64):
        pytest.skip("kernels with a planted bug have one head dim, and no fp16")


def decode(kernels: Kernels, step: Step, splits: int = 0) -> Results:
    skip_what_is_not_planted(step.q)
    to = (lambda t: t) if kernels.device == "cpu" else (lambda t: t if t is None else t.cuda())
    q, k, v = (to(t) for t in step[:3])
    args, where = TensorArgs(*map(to, step.args)), CacheArgs(*map(to, step.cache))
    assert kernels.module.supports_decode(q, k, v, args, step.spec, where) is None
    more = {} if kernels.name == "cpu" else {"splits": splits}
    got = kernels.run(lambda: kernels.module.decode(q, k, v, args, step.spec, where, **more))
    return Results(*(t.cpu() for t in got))


def check(kernels: Kernels, case: Case) -> Results:
    got = decode(kernels, build(case), case.splits)
    for i, want in enumerate(expected(case)):
        testing.check(Results(got.out[i : i + 1], got.lse[i : i + 1]), want, f"sequence {i}")
    return got


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
    check(kernels, Case(dims, (2, 1), queries, (70, 130), dtype, stored, 16, left=60))


# ---------------------------------------------------------------- what must not matter


@pytest.mark.parametrize("stored", [None, *STORED])
@pytest.mark.parametrize("queries", [1, 3, 16])
def test_pages_room_and_batch_change_no_bit(kernels, queries, stored):
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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32", "fp32 fp8", "bf16 fp8"])
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (16, 1)])
def test_a_value_reaches_those_who_see_it_and_no_others(kernels, heads, kind, bad):
    """The last key but one is seen by the last two queries; a value of it is not finite."""
    dtype, stored = (*kind.split(), None)[:2]
    if stored and math.isinf(bad):
        bad = math.nan  # float8_e4m3fn has no infinity
    for length in (40, 64, 65, 130) if VARIANT == "plain" else (65,):
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


def _refused(kernels: Kernels, call: Callable[[], Any], text: str) -> None:
    if kernels.device == "cuda":
        pytest.skip("gpu: a device-side assertion ends the process's CUDA context")
    with pytest.raises(RuntimeError, match=text):
        call()


@pytest.mark.parametrize("page", [-1, 9, 10**6])
def test_pages_out_of_range_are_refused(kernels, page):
    step = build(Case(lengths=(40, 20), page=16))
    table = step.cache.block_table.clone()
    table[0, 1] = page
    bad = step._replace(cache=step.cache._replace(block_table=table))
    _refused(kernels, lambda: decode(kernels, bad), "no such page|block_table.*expected 0 to 8")


def test_rows_and_lengths_out_of_range_are_refused(kernels):
    step = build(Case(lengths=(40, 20)))
    for row in (-1, 2):
        index = torch.tensor([0, row], dtype=torch.int32)
        bad = step._replace(cache=CacheArgs(None, None, index))
        _refused(
            kernels, lambda bad=bad: decode(kernels, bad), "no such page|batch_index.*expected 0"
        )
    for length in (-1, 44):
        lengths = torch.tensor([length, 20], dtype=torch.int32)
        bad = step._replace(args=step.args._replace(lengths=lengths))
        _refused(kernels, lambda bad=bad: decode(kernels, bad), "more tokens than|lengths.0. asks")


def test_what_the_operators_refuse():
    module, step = emulated(), build(Case())
    q, k, v, args, spec = step[:5]
    for bad, text in [
        ((q.double(), k, v), "dtype"),
        ((q, k[..., :32], v), "shapes of q, k and v"),
        ((q[..., :48], k[..., :48].contiguous(), v), "no CUDA kernel for these head dims"),
        ((q, k[..., 1:], v), "shapes of q, k and v|16 bytes"),
        ((q, torch.zeros(*k.shape[:3], 65, dtype=k.dtype)[..., :64], v), "multiples of 16 bytes"),
        ((q, k[:1], v[:1]), "has 1 rows, expected 2"),
        ((q, k.float(), v.float()), "dtypes that do not fit"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            module.decode(*bad, args, spec)
    with pytest.raises(RuntimeError, match="takes no bias"):
        module.decode(q, k, v, args._replace(bias=q.new_zeros(2, 4, 1, 73)), spec)


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
        _refused(kernels, lambda full=full: kernels.module.append(k, k, *cache, full),
                 "no room for its new tokens|lengths.[01]. asks")  # fmt: skip
    empty, index = torch.zeros(2, dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    where = CacheArgs(None, None, index)
    _refused(kernels, lambda: kernels.module.append(k, k, *cache, empty, where),
             "no such page|expected 0 to 1")  # fmt: skip
    short = torch.ones(2, 32)
    _refused(kernels, lambda: kernels.module.append(
        k, k, *cache, empty, CacheArgs(), RotaryTables(short, short)), "positions")  # fmt: skip


# ---------------------------------------------------------------- the same under sanitizers


def runtimes(variant: str) -> str:
    """What has to be loaded before Python; libstdc++ too, or exceptions are not seen."""
    compiler = os.environ.get("CXX", "g++").split()
    found = []
    for library in (f"lib{variant}.so", "libstdc++.so"):
        done = subprocess.run(
            [*compiler, f"-print-file-name={library}"], capture_output=True, text=True
        )
        found.append(done.stdout.strip())
        if found[-1] == library:
            pytest.skip(f"{compiler[0]} has no {library}")
    return " ".join(found)


@pytest.mark.skipif(VARIANT != "plain" or bool(LIBRARY), reason="this is the started process")
def test_sanitizers():
    """Every test above, of the emulated kernels, in one order; both sanitizers at once."""
    started = {}
    for variant in ("asan", "tsan"):
        built(variant)
        environment = {
            **os.environ,
            "CUDA_EMULATOR": variant,
            "LD_PRELOAD": runtimes(variant),
            "ASAN_OPTIONS": "detect_leaks=0",
            "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-x", "-p", "no:cacheprovider",
                   "-k", "emulated", __file__]  # fmt: skip
        started[variant] = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    for process in started.values():
        said, _ = process.communicate(timeout=900)
        assert process.returncode == 0, said[-6000:]
        passed = re.search(r"(\d+) passed", said)
        assert passed is not None
        assert int(passed[1]) > 200
        COUNTS.extend(f"{line}, {passed[0]}" for line in re.findall("CUDA emulator.*", said))


COUNTS: list[str] = []  # what ran in the emulator, shown below the tests


@pytest.fixture(scope="module", autouse=True)
def _counted(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if emulated.cache_info().currsize:
        launches, threads = torch.ops.attnkit_emulated.counts().split()
        COUNTS.append(f"CUDA emulator ({VARIANT}): {launches} launches, {threads} CUDA threads")
    plugins = request.config.pluginmanager
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        for line in COUNTS:
            plugins.getplugin("terminalreporter").write_line(f"\n{line}")
