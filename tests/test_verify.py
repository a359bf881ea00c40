"""`attnkit verify`: right where the kernels are, and not where one of them is slightly wrong."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnkit import cli, determinism, dispatch, testing, verify
from attnkit.backends import cpu
from attnkit.verify import Report, Target

ROOT = Path(__file__).resolve().parents[1]
built = pytest.mark.skipif(not cpu.BUILT, reason="attnkit was installed without its C++ extension")
SMALL = testing.Case("small", 1, 2, 1, 17, 40, 32, right=30, sinks=True, bias="float:1hqk")


@pytest.fixture
def few(monkeypatch):
    """One small case and one promise in place of all of them."""
    monkeypatch.setattr(verify, "CASES", (SMALL,))
    monkeypatch.setattr(
        determinism, "PROMISES", {("backward", "cpu"): ("repeat",), ("forward", "cpu"): ()}
    )
    monkeypatch.setattr(determinism, "_PLAIN", [SMALL])


def own_target(*dtypes: str) -> Target:
    return Target("cpu", cpu.instruction_set(), dtypes or ("fp32",))


def examined(target: Target, end: float = math.inf) -> Report:
    return verify.examine(target, end, lambda done, of: None)


def off(results, n, by=1e-4):
    """Result n, slightly wrong in one place."""
    wrong = results[n].clone()
    wrong.view(-1)[wrong.numel() // 2] += by
    return (*results[:n], wrong, *results[n + 1 :])


@built
def test_the_kernels_are_right(few):
    report = examined(own_target(*verify.DTYPES))
    assert report.wrong == []
    assert report.done == report.steps == 4 * (1 + 1 + 1 + 1)
    rows = {row for row, _ in report.cells}
    assert {*testing.Results._fields} <= rows
    assert {"decode, pages", "decode, int8", "append, int8", "same bits: repeat"} <= rows
    assert rows <= set(verify.ROWS)
    for (row, _), cell in report.cells.items():
        if cell.share is None:
            assert row.startswith(("append", "same bits"))
        else:
            assert 0 <= cell.share < 1


PLANTED = {
    **{name: ("forward", n, name) for n, name in enumerate(("out", "lse"))},
    **{name: ("backward", n, name) for n, name in enumerate(("dq", "dk", "dv", "dbias", "dsinks"))},
    "decode": ("decode", 0, "decode"),
    "decode, pages": ("decode", 0, "decode, pages"),
    "decode, int8": ("decode", 1, "decode, int8"),
}


@built
@pytest.mark.parametrize(("function", "n", "row"), PLANTED.values(), ids=PLANTED)
def test_a_slightly_wrong_kernel_is_found(few, monkeypatch, function, n, row):
    right = getattr(cpu, function)

    def wrong(*arguments):
        results = right(*arguments)
        cache = arguments[5] if function == "decode" else None
        hit = (
            row not in ("decode, pages", "decode, int8")
            or (row == "decode, int8" and cache.k_scale is not None)
            or (row == "decode, pages" and cache.block_table is not None)
        )
        return off(results, n) if hit else results

    monkeypatch.setattr(cpu, function, wrong)
    report = examined(own_target())
    assert report.cells[row, "fp32"].wrong
    assert any(f" fp32 {row}: " in sentence for sentence in report.wrong)
    assert "WRONG" in verify.table(report)
    if row == "decode, pages":
        assert not report.cells["decode", "fp32"].wrong


@built
def test_a_token_in_a_wrong_slot_is_found(few, monkeypatch):
    right = cpu.append
    monkeypatch.setattr(cpu, "append", lambda k, v, *rest: right(k, v.roll(1, 1), *rest))
    report = examined(own_target())
    assert report.cells["append", "fp32"].wrong
    assert report.cells["append, int8", "fp32"].wrong


@built
def test_bits_that_change_are_found(few, monkeypatch):
    right, calls = cpu.backward, []

    def wrong(*arguments):
        calls.append(1)
        return off(right(*arguments), 1, 1e-6 * len(calls))

    monkeypatch.setattr(cpu, "backward", wrong)
    assert examined(own_target()).cells["same bits: repeat", "fp32"].wrong


@built
def test_a_kernel_that_raises_is_found(few, monkeypatch):
    def wrong(*arguments):
        raise RuntimeError("no such tile")

    monkeypatch.setattr(cpu, "decode", wrong)
    report = examined(own_target())
    assert report.cells["raised", "fp32"].wrong == ["RuntimeError: no such tile"]
    assert report.done == report.steps


@built
def test_other_kernels_than_asked_for_are_no_result(few):
    report = examined(Target("cpu", "avx9000"))
    assert report.wrong == [
        f"cpu (avx9000): the kernels in use are those of {cpu.instruction_set()}"
    ]


def test_however_late_something_is_checked():
    report = examined(Target("reference"), end=0.0)
    assert report.done == verify.AT_LEAST < report.steps
    assert report.wrong == []


def test_the_command_refuses_no_time(capsys):
    with pytest.raises(SystemExit):
        cli.main(["verify", "--seconds", "0"])
    assert "argument --seconds: 0, expected more than 0" in capsys.readouterr().err


# --- the command, with faults in its processes ---------------------------------------------------

# Python runs this before anything else: the CPU kernels are slightly wrong, the reference crashes.
FAULTS = """
import os, signal
from attnkit.backends import cpu, reference
right = cpu.forward
def wrong(*arguments):
    out, lse = right(*arguments)
    return out * (1 + 2e-5), lse
cpu.forward = wrong
reference.forward = lambda *arguments: os.kill(os.getpid(), signal.SIGSEGV)
"""


def command(*arguments: str, path: Path, timeout: float = 600, **environment: str):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(path), str(ROOT))),
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-m", "attnkit", "verify", *arguments],
        env=environment,
        cwd=path,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@built
def test_the_exit_status_says_that_something_is_wrong(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(FAULTS)
    done = command("--seconds", "1", path=tmp_path, ATTNKIT_CPU_ISA="portable")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cpu (portable) fp32 out: causal: out: largest error" in done.stdout
    assert "reference: the process ended by SIGSEGV after 0 checks" in done.stdout
    assert "attnkit info" in done.stdout
    assert "cpu (portable): " in done.stderr  # how far it is


@built
@pytest.mark.slow
def test_all_of_it_is_right_here(tmp_path):
    done = command("--seconds", "900", path=tmp_path, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything is right" in done.stdout
    for name in dispatch.available_backends():
        assert f"\n{name} " in done.stdout


@built
@pytest.mark.slow
def test_a_bug_in_a_kernel_is_found(tmp_path):
    """The C++ sources, compiled with one line of them changed."""
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        import mutants
    finally:
        sys.path.remove(str(ROOT / "tests"))
    clean = tmp_path / "clean"
    mutants.copy_package(clean)
    (clean / "objects").mkdir()
    builder = mutants.Builder(clean / "objects")
    builder.baseline(clean / "csrc", 2)
    builder.library(clean / "objects", clean / "attnkit" / "_C.abi3.so")
    (bug,) = (m for m in mutants.MUTANTS if m.label == "online softmax: the output is not rescaled")
    changed = tmp_path / "changed"
    mutants.copy_package(changed)
    source = changed / "csrc" / "cpu" / bug.file
    source.write_text(source.read_text().replace(bug.old, bug.new))
    (changed / "objects").mkdir()
    builder.compile(changed / "csrc", "isa_portable", changed / "objects")
    builder.library(changed / "objects", changed / "attnkit" / "_C.abi3.so")
    for package, status in ((clean, 0), (changed, 1)):
        done = subprocess.run(
            [sys.executable, "-m", "attnkit", "verify", "--seconds", "60"],
            env={**os.environ, "PYTHONPATH": str(package), "ATTNKIT_CPU_ISA": "portable"},
            cwd=package,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == status, done.stdout + done.stderr
    assert "cpu (portable) fp32 out" in done.stdout
