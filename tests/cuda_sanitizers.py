"""Runs the tests of the emulated CUDA kernels under sanitizers, in processes beside this one."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cuda_kernels import built

FILES = [str(Path(__file__).with_name(f"test_cuda_{name}.py")) for name in ("decode", "extend")]
RUNS: dict[str, Run] = {}


class Run(threading.Thread):
    """One sanitizer: builds the kernels with it, then every emulated test, in one order."""

    def __init__(self, variant: str) -> None:
        super().__init__(daemon=True)
        self.variant = variant
        self.process: subprocess.Popen[str] | None = None
        self.said = ""
        self.error: BaseException | None = None  # a reason to skip the test is one

    def run(self) -> None:
        try:
            built(self.variant)
            environment = {
                **os.environ,
                "CUDA_EMULATOR": self.variant,
                "LD_PRELOAD": runtimes(self.variant),
                "ASAN_OPTIONS": "detect_leaks=0",
                "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1",
                "OMP_NUM_THREADS": "1",
            }
            # -s: or a sanitizer's report would go with the output that is captured
            command = [sys.executable, "-m", "pytest", "-q", "-s", "-x", "-p", "no:cacheprovider",
                       "-k", "emulated", *FILES]  # fmt: skip
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self.said, _ = self.process.communicate()
        except BaseException as error:
            self.error = error

    def result(self, seconds: float) -> tuple[int, str]:
        """The exit status and what was said, once it has come to its end."""
        self.join(seconds)
        if self.error is not None:
            raise self.error
        if self.is_alive() or self.process is None:
            pytest.fail(f"{self.variant} has not ended within {seconds:.0f} s")
        return self.process.returncode, self.said


def start() -> None:
    """Start both sanitizers, if they have not been: they take as long as all other CUDA tests."""
    if RUNS:
        return
    built("plain")  # of which all variants take the operators
    atexit.register(stop)
    for variant in ("asan", "tsan"):
        RUNS[variant] = Run(variant)
        RUNS[variant].start()


def stop() -> None:
    """End what is still running, as after an interrupt."""
    for run in RUNS.values():
        if run.process is not None and run.process.poll() is None:
            run.process.kill()


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
