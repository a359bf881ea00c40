"""The tests marked `isa`, once for every instruction set that this processor has.

The set is chosen when the extension is loaded, so each one is a process of its own.  There malloc
fills what it hands out and what it takes back: a kernel that reads unwritten scratch shows.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from attnkit import testing
from attnkit.backends import cpu
from attnkit.testing import Case

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    f"tests/test_{name}.py"
    for name in ("forward", "backward", "decode", "paged_cache", "determinism", "dropout")
]
FORCED = os.environ.get("ATTNKIT_CPU_ISA")
built = pytest.mark.skipif(not cpu.BUILT, reason="attnkit was installed without its C++ extension")


def test_the_extension_is_there_if_it_can_be():
    """Tests skip where it is missing; that is never the whole story where it could be built."""
    if os.environ.get("ATTNKIT_BUILD_EXT") == "0":
        pytest.skip("ATTNKIT_BUILD_EXT=0")
    if not sys.platform.startswith("linux") or not shutil.which("c++"):
        pytest.skip("no compiler, or not Linux")
    assert cpu.BUILT


def others() -> list[str]:
    """The sets that the ordinary run of the tests does not use."""
    if not cpu.BUILT or FORCED:
        return []
    return [name for name in cpu.available_isas() if name != cpu.instruction_set()]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )


def run_all(name: str) -> subprocess.CompletedProcess[str]:
    own = "tests/test_instruction_sets.py::test_the_forced_set_is_in_use"
    # the kernels of float64 are the same in every set
    chosen = ["-m", "isa", "-k", "(cpu or determinism or forced_set) and not float64"]
    return python(
        "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *chosen, *FILES, own,
        ATTNKIT_CPU_ISA=name, MALLOC_PERTURB_="165",
    )  # fmt: skip


@pytest.fixture(scope="module")
def results() -> dict[str, subprocess.CompletedProcess[str]]:
    """One process per set, as many at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(others(), pool.map(run_all, others()), strict=True))


@built
@pytest.mark.parametrize("name", others())
def test_contract(name, results):
    done = results[name]
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


@built
@pytest.mark.isa
def test_the_forced_set_is_in_use():
    assert cpu.instruction_set() == (FORCED or cpu.available_isas()[0])


@built
def test_float64_is_the_same_for_all():
    """It is built once: the same bits whatever is forced."""
    script = (
        "import torch; from attnkit import testing; from attnkit.testing import Case;"
        "x = testing.build(Case('', 2, 4, 2, 33, 70, 24, right=20), torch.float64);"
        "print(testing.run('cpu', x).dq.sum().item().hex())"
    )
    here = testing.run("cpu", testing.build(Case("", 2, 4, 2, 33, 70, 24, right=20), torch.float64))
    assert here.dq is not None
    for name in others():
        done = python("-c", script, ATTNKIT_CPU_ISA=name)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.strip() == here.dq.sum().item().hex()


@built
def test_an_unknown_set_is_refused_by_name():
    script = "import torch; from attnkit.backends import cpu; print(cpu.instruction_set())"
    done = python("-c", script, ATTNKIT_CPU_ISA="avx9000")
    assert done.returncode != 0
    assert "ATTNKIT_CPU_ISA is avx9000" in done.stderr
    assert "portable" in done.stderr
