"""The emulator of tests/cuda_emulator: right kernels pass in any order, wrong ones are caught."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

BUILD = Path(__file__).parent / "cuda_emulator" / "build.py"

# name of a mistake -> what some run has to say about it
MISTAKES = {
    "sum-two-barriers": ("plain", "meet at different barriers"),
    "sum-exited-lane": ("plain", "reads lane 31, which does not take part"),
    "sum-too-much-shared": ("plain", "16384 bytes are carved, 64 were launched"),
    "sum-half-mask": ("plain", "does not take part"),
    "sum-overlapping-masks": ("plain", "does not take part"),
    "sum-unwritten": ("plain", "wrong numbers"),
    "sum-trap": ("plain", "__trap()\n  block (0,0,0) thread 40 at "),
    "copy-without-wait": ("plain", "wrong numbers"),
    "copy-misaligned": ("plain", "not aligned to its size"),
    "copy-of-12-bytes": ("plain", "cp.async of 12 bytes"),
    "sum-beyond-shared": ("asan", "use-after-poison"),
    "sixteen-misaligned": ("asan", "misaligned address"),
    "sum-without-barrier": ("tsan", "data race"),
    "sum-some-miss-the-barrier": ("tsan", "data race"),
    "copy-without-syncwarp": ("tsan", "data race"),
    "last-block-without-fence": ("tsan", "data race"),
}
RIGHT = ["sum", "copy", "sixteen", "last-block", "product-bf16", "product-fp16"]


@cache
def selftest(variant: str) -> str:
    done = subprocess.run(
        [sys.executable, BUILD, "selftest", variant], capture_output=True, text=True
    )
    if done.returncode == 3:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def said(variant: str, *cases: str, order: int = 0) -> str:
    done = subprocess.run(
        [selftest(variant), str(order), *cases], capture_output=True, text=True, timeout=60
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("variant", ["plain", "asan", "tsan"])
def test_right_kernels_pass_in_any_order(variant):
    for order in (0, 1, 7):
        assert said(variant, *RIGHT, order=order) == "ok\n" * len(RIGHT), order


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_caught(case):
    variant, text = MISTAKES[case]
    assert text in said(variant, case)


def test_a_race_may_hide_from_the_numbers():
    """Why sanitizers: in one order of threads a missing barrier changes no result."""
    assert said("plain", "sum-without-barrier", order=1) == "ok\n"
    assert said("plain", "sum-without-barrier") != "ok\n"
