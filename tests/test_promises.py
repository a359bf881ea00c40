"""Each promise of attnkit.determinism is kept, is written in the documentation, and could break."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from attnkit import determinism, dispatch
from attnkit.backends import cpu, triton
from attnkit.determinism import KINDS, OPERATIONS, PROMISES

ROOT = Path(__file__).resolve().parents[1]
FLOAT = torch.float32
DTYPES = {
    "cpu": (FLOAT, torch.bfloat16, torch.float16, torch.float64),
    "cuda": (torch.bfloat16,),
    "triton": (torch.float16,),
    "reference": (FLOAT, torch.float16),
}


def entries():
    """Every promise of every backend, with each dtype; those that take their time are slow."""
    for (operation, backend), kinds in PROMISES.items():
        slow = backend == "cuda" or (backend == "triton" and operation != "forward")
        for kind in kinds:
            for dtype in DTYPES[backend]:
                name = f"{operation}-{backend}-{kind}-{str(dtype)[6:]}"
                marks = [pytest.mark.slow] if slow else []
                yield pytest.param(operation, backend, kind, dtype, id=name, marks=marks)


def module_of(backend: str) -> ModuleType:
    """The backend; CUDA kernels in their emulator."""
    if (backend == "triton") != triton.INTERPRETED:
        pytest.skip("Triton's interpreter has a process of its own (TRITON_INTERPRET=1)")
    if backend == "cpu" and not cpu.BUILT:
        pytest.skip("attnkit was installed without its C++ extension")
    if backend != "cuda":
        return dispatch.BACKENDS[backend]
    sys.path.insert(0, str(Path(__file__).parent))
    from cuda_kernels import emulated

    return emulated()


@pytest.mark.parametrize(("operation", "backend", "kind", "dtype"), list(entries()))
def test_a_promise_is_kept(operation, backend, kind, dtype):
    assert determinism.broken(operation, kind, module_of(backend), dtype) == []


def unsteady(kind: str) -> SimpleNamespace:
    """The CPU kernels, but for a rounding error that depends on what `kind` says it must not."""
    calls = []

    def error(q, cache) -> float:
        calls.append(q)
        depends = {
            "repeat": len(calls),
            "threads": torch.get_num_threads(),
            "batch": q.shape[0] if q.shape[0] > 1 else q.shape[2],  # or of a pack
            "prefix": q.shape[2],
            "paged": cache is not None and cache.block_table is not None,
        }
        return 1.0 + 1e-5 * float(depends[kind])

    def append(k, v, k_cache, v_cache, lengths, cache):
        cpu.append(k, v * error(k, cache), k_cache, v_cache, lengths, cache)

    def first_off(by, results):
        return (results[0] * by, *results[1:])

    return SimpleNamespace(
        supports=cpu.supports,
        supports_decode=cpu.supports_decode,
        forward=lambda *x: first_off(error(x[0], None), cpu.forward(*x)),
        backward=lambda *x: first_off(error(x[2], None), cpu.backward(*x)),
        decode=lambda *x: first_off(error(x[0], x[5]), cpu.decode(*x)),
        append=append,
    )


@pytest.mark.skipif(not cpu.BUILT, reason="attnkit was installed without its C++ extension")
@pytest.mark.parametrize(
    ("operation", "kind"),
    [(o, k) for (o, b), kinds in PROMISES.items() if b == "cpu" for k in kinds],
)
def test_a_broken_promise_is_seen(operation, kind):
    assert determinism.broken(operation, kind, unsteady(kind), FLOAT)


def test_the_page_says_what_is_promised():
    """The rows of docs/determinism.md: | operation | backend | dtypes | yes or - ... |."""
    page = (ROOT / "docs/determinism.md").read_text()
    rows = re.findall(r"^\| `(\w+)` +\| `(\w+)` +\|[^|]*\|(.*)\|$", page, re.M)
    written = {}
    for operation, backend, cells in rows:
        words = [cell.strip() for cell in cells.split("|")]
        assert len(words) == len(KINDS)
        assert set(words) <= {"yes", "-"}
        kept = tuple(kind for kind, word in zip(KINDS, words, strict=True) if word == "yes")
        written[operation, backend] = kept
    assert written == PROMISES
    assert {operation for operation, _ in PROMISES} == set(OPERATIONS)
    assert {backend for _, backend in PROMISES} == set(dispatch.BACKENDS)
