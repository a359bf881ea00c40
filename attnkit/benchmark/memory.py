"""How much more memory does a call need at its peak than its inputs take?

Measured in a process of its own: the kernel's high-water mark of resident memory is reset just
before the call and read just after it.  The process is forked from a helper that has imported torch
and done nothing else, so that no measurement sees the caches of another.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from attnkit.benchmark.cases import Case
from attnkit.benchmark.suites import SUITES
from attnkit.benchmark.tasks import Task

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # of VmHWM; see proc(5)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's names for mallopt
PR_SET_THP_DISABLE = 41
SMALL = 64 * 1024  # bytes; from here on, memory that is freed goes back to the system at once

WARM_UP_LENGTH = 128  # several tiles: every thread and code path starts before the measurement


@dataclass(frozen=True)
class MemoryUse:
    """``extra`` bytes appeared at the peak: output, gradients and workspace, but not the inputs.

    ``method`` is ``hwm`` (high-water mark, reset before the call) or ``maxrss`` (the process's
    maximum since its start, where the system does not allow the reset: too small when the inputs'
    set-up took more than the call did).
    """

    extra: int
    method: str
    tensor_bytes: int  # of q, k, v and the output

    @property
    def ratio(self) -> float:
        """Extra bytes relative to q, k, v and the output."""
        return self.extra / self.tensor_bytes


class MemoryMeter:
    """A helper process that measures one case after the other, each in a fork of its own.

    Use it as a context manager.  ``measure`` raises RuntimeError with the child's message when the
    case failed there.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or torch.get_num_threads()
        self._open = False
        self._helper: subprocess.Popen[str] | None = None

    def __enter__(self) -> MemoryMeter:
        self._open = True
        return self

    def __exit__(self, *failure: object) -> None:
        self._open = False
        if self._helper is not None:
            self._helper.communicate()  # the end of its input ends it
            self._helper = None

    def _started(self) -> subprocess.Popen[str]:
        """The helper; it takes seconds to import torch, so it starts when first needed."""
        if not self._open:
            raise RuntimeError("MemoryMeter is closed, expected it inside a with statement")
        if self._helper is None:
            code = "from attnkit.benchmark.memory import serve; serve()"
            root = str(Path(__file__).resolve().parent.parent.parent)
            paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
            self._helper = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        return self._helper

    def measure(self, name: str, task: Task) -> MemoryUse:
        """Peak extra memory of the implementation ``name`` at a task."""
        helper = self._started()
        assert helper.stdin is not None  # both are pipes
        assert helper.stdout is not None
        request = {"name": name, "threads": self._threads, **asdict(task)}
        helper.stdin.write(json.dumps(request) + "\n")
        helper.stdin.flush()
        line = helper.stdout.readline()
        if not line:
            raise RuntimeError(f"the memory helper ended with exit code {helper.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{name}, {task.group}: {answer['error']}")
        return MemoryUse(**answer)


def serve() -> None:
    """The helper: one request as a line of JSON on stdin, one answer as a line on stdout."""
    _return_freed_memory()
    for line in sys.stdin:
        print(_in_a_fork(lambda line=line: _answer(json.loads(line))), flush=True)  # type: ignore[misc]


def _answer(request: dict[str, object]) -> dict[str, object]:
    torch.set_num_threads(int(str(request["threads"])))
    case = Case(**request["case"])  # type: ignore[arg-type]
    task = Task(str(request["suite"]), str(request["operation"]), case)
    return asdict(measure_here(str(request["name"]), task))


def measure_here(name: str, task: Task) -> MemoryUse:
    """Measure in this process, which should be a fresh one."""
    contest = SUITES[task.suite].contest
    small = replace(task.case, queries=WARM_UP_LENGTH, keys=WARM_UP_LENGTH)
    contest(small, 0).prepare(name, task.operation).call()
    work = contest(task.case, 0).prepare(name, task.operation)
    extra, method = peak_growth(work.call)
    return MemoryUse(extra, method, task.case.tensor_bytes())


def peak_growth(call: Callable[[], object]) -> tuple[int, str]:
    """Bytes by which resident memory grew at the peak of ``call``, and how that was found."""
    _trim()
    if _reset_peak():
        before = _status("VmRSS")
        kept = call()
        growth = _status("VmHWM") - before
        method = "hwm"
    else:
        before = _max_rss()
        kept = call()
        growth = _max_rss() - before
        method = "maxrss"
    del kept  # alive until the peak was read
    return max(0, growth), method


def loglog_slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The exponent p of the best fit ``values ~ sizes ** p`` (least squares on the logarithms)."""
    if len(sizes) != len(values) or len(sizes) < 2:
        raise ValueError(
            f"sizes has {len(sizes)} numbers, values {len(values)}; expected two or more of each"
        )
    xs, ys = [math.log(x) for x in sizes], [math.log(y) for y in values]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - x_mean) ** 2 for x in xs)


def _in_a_fork(work: Callable[[], dict[str, object]]) -> str:
    """The JSON of ``work()``, done in a fork where there is one."""

    def answer() -> str:
        try:
            return json.dumps(work())
        except Exception as error:  # it crosses a process border, and is raised there
            return json.dumps({"error": f"{type(error).__name__}: {error}"})

    if not hasattr(os, "fork"):
        return answer()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writing, "w") as pipe:
            pipe.write(answer())
        os._exit(0)  # not through the helper's clean-up: its files are not ours
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return text or json.dumps({"error": f"the process ended with exit code {code}"})


def _reset_peak() -> bool:
    """Set VmHWM to what is resident now; False where the system has no such thing or forbids it."""
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def _status(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no {field}")


def _max_rss() -> int:
    import resource  # not on every system

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _return_freed_memory() -> None:
    """Let every larger free give its pages back, and count pages one by one, not as huge pages."""
    library = _c_library()
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, SMALL)
        library.mallopt(M_TRIM_THRESHOLD, SMALL)
    if hasattr(library, "prctl"):
        library.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)


def _trim() -> None:
    """Give back what the set-up freed, so that the call cannot reuse it unseen."""
    library = _c_library()
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
