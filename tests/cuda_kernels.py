"""Where the tests of the CUDA kernels run them, and the cases that they have in common.

The CPU kernels, the CUDA kernels in an emulator (in three orders of blocks, and under sanitizers),
and the CUDA kernels on a GPU take the same calls.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from attnkit import testing
from attnkit.backends import cpu, cuda, reference
from attnkit.spec import AttentionSpec, CacheArgs, TensorArgs
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
    torch.ops.load_library(LIBRARY or built(VARIANT))
    # a copy of a name of its own: torch.compile looks names up in sys.modules
    spec = importlib.util.spec_from_file_location("attnkit_emulated", str(cuda.__file__))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.OPERATORS, module.DEVICE, module.BUILT = torch.ops.attnkit_emulated, "cpu", True
    return module


PLACES = ("cpu", "emulated", "gpu")


def choose(name: str) -> Kernels:
    """The kernels of one of PLACES; skips the test where they cannot run."""
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


def refused(kernels: Kernels, call: Callable[[], Any], text: str) -> None:
    if kernels.device == "cuda":
        pytest.skip("gpu: a device-side assertion ends the process's CUDA context")
    with pytest.raises(RuntimeError, match=text):
        call()


def say(request: pytest.FixtureRequest, line: str) -> None:
    """Show a line among pytest's own."""
    plugins = request.config.pluginmanager
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        plugins.getplugin("terminalreporter").write_line(f"\n{line}")
