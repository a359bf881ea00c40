"""Measure tasks: check the numbers, time implementations against each other, weigh the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from attnkit.benchmark import gpu
from attnkit.benchmark.cases import DTYPES, Case
from attnkit.benchmark.implementations import IMPLEMENTATIONS
from attnkit.benchmark.memory import MemoryMeter
from attnkit.benchmark.peers import PEERS
from attnkit.benchmark.probes import PROBE, Peak, Probe, flops_probe, read_probe
from attnkit.benchmark.results import Results, Row
from attnkit.benchmark.suites import SUITES
from attnkit.benchmark.tasks import Contest, Task, Work
from attnkit.benchmark.timing import CLOCKS, Candidate, compare

# of others: if one of them fails, the rest is measured all the same, and the table says why
OPTIONAL = ("flex", *PEERS)

# who is measured unless somebody asks for more: who needs no other library and no compiler
USUAL = (
    *("attnkit", "attnkit-plain", "attnkit-padded", "attnkit-eager"),
    *("torch", "torch:folded", "torch-loop", "torch-eager", "naive", "hf:eager", "hf:sdpa"),
)

FORCEABLE = ("forward", "backward", "step", "masks", "decode")  # suites that take attnkit:backend


@dataclass(frozen=True)
class Settings:
    """How to measure, and whom: of ``implementations`` those that a suite knows, () for all."""

    rounds: int = 7
    min_time: float = 0.05  # seconds of each candidate in each round
    seed: int = 0  # of the inputs and of the order
    implementations: tuple[str, ...] = USUAL
    clock: str = "wall"  # or "cpu", for one thread on a machine that is busy with other work


@dataclass(frozen=True)
class Preset:
    """A named choice of tasks, with the settings that fit its time."""

    tasks: tuple[Task, ...]
    settings: Settings = field(default_factory=Settings)

    @classmethod
    def of(
        cls,
        cases: Iterable[Case],
        operations: Sequence[str] = ("forward", "backward"),
        settings: Settings | None = None,
    ) -> Preset:
        """Each case with each of the operations of attention."""
        tasks = tuple(Task(name, name, case) for case in cases for name in operations)
        return cls(tasks, settings or Settings())


class Workshop:
    """Contests, probes and the memory meter of a run; each made once, when first needed.

    Use it as a context manager.
    """

    def __init__(self, settings: Settings, *, memory: bool = True) -> None:
        self.settings = settings
        self.skipped: list[dict[str, str]] = []
        self._memory = memory
        self._meter = MemoryMeter()
        self._probes: dict[tuple[str, str, str], Probe | None] = {}
        self._last: tuple[object, Contest] | None = None
        self._stopwatches: dict[str, gpu.Stopwatch] = {}

    def __enter__(self) -> Workshop:
        self._meter.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._meter.__exit__(*failure)

    def contest(self, task: Task) -> Contest:
        """The task's inputs and truth; kept while the next tasks have the same."""
        make = SUITES[task.suite].contest
        key = (make, task.case)
        if self._last is None or self._last[0] != key:
            self._last = None  # its tensors go before the next come
            self._last = key, make(task.case, self.settings.seed)
        return self._last[1]

    def measure(self, task: Task) -> list[Row]:
        """Rows of all implementations on one task, checked and then timed against each other.

        Raises:
            WrongResult: numbers of attnkit or of PyTorch are wrong; nothing is timed then.
        """
        suite, contest = SUITES[task.suite], self.contest(task)
        names, reasons = chosen(task, self.settings.implementations)
        works: dict[str, Work] = {}
        errors: dict[str, dict[str, float]] = {}
        for name in names:
            try:
                work = contest.prepare(name, task.operation)
                errors[name] = contest.check(name, task.operation, work.results())
            except Exception as error:
                if name not in OPTIONAL:
                    raise
                reasons[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                continue
            works[name] = work
        where = {"case": task.case.label, "operation": task.operation}
        self.skipped += [
            {**where, "implementation": name, "reason": reason} for name, reason in reasons.items()
        ]
        device, settings = task.case.device, self.settings
        watch = self._stopwatch(device)
        probe = self._probe(suite.roof, device, task.case.dtype)
        candidates = [Candidate(name, work.call, stopwatch=watch) for name, work in works.items()]
        if probe is not None:
            candidates.append(probe.candidate())
        timed = compare(
            candidates,
            rounds=settings.rounds,
            min_time=settings.min_time,
            seed=settings.seed,
            clock=CLOCKS[settings.clock],
        )
        peak = None if probe is None else Peak.of(probe, timed.samples[PROBE])
        rows = []
        for name, work in works.items():
            extra, method = self._peak_memory(name, task, work) if suite.memory else (None, None)
            rows.append(
                Row(
                    group=task.group,
                    operation=task.operation,
                    implementation=name,
                    backend=contest.ran(name),
                    shape=task.case.shape,
                    dtype=task.case.dtype,
                    mask=task.case.mask,
                    device=device,
                    **asdict(timed.samples[name]),
                    flops=suite.flops(task.case, task.operation),
                    peak=peak,
                    errors=errors[name],
                    extra_bytes=extra,
                    memory_method=method,
                    extra=dict(work.extra or {}),
                    suite=task.suite,
                    bytes=work.bytes,
                )
            )
        return rows

    def check(self, task: Task, name: str) -> str | None:
        """Do the work of one implementation once and check it; why not, if it cannot be done.

        Raises:
            WrongResult: its numbers are wrong.
        """
        reason = chosen(task, [name])[1].get(name)
        if reason is None:
            contest = self.contest(task)
            contest.check(name, task.operation, contest.prepare(name, task.operation).results())
        return reason

    def results(self, rows: Iterable[Row], **how: Any) -> Results:
        """The rows with all that one has to know beside them."""
        settings = asdict(self.settings)
        settings["implementations"] = list(self.settings.implementations)
        return Results.here(rows, settings | how, self.skipped)

    def _peak_memory(self, name: str, task: Task, work: Work) -> tuple[int | None, str | None]:
        if not self._memory:
            return None, None
        if task.case.device != "cpu":
            return gpu.peak_growth(work.call, task.case.device), "allocator"
        use = self._meter.measure(name, task)
        return use.extra, use.method

    def _stopwatch(self, device: str) -> gpu.Stopwatch | None:
        if device == "cpu":
            return None
        if device not in self._stopwatches:
            self._stopwatches[device] = gpu.Stopwatch(device)
        return self._stopwatches[device]

    def _probe(self, roof: str, device: str, dtype: str) -> Probe | None:
        key = (roof, device, dtype if device != "cpu" else "")
        if key not in self._probes:
            self._probes[key] = self._make_probe(roof, device, dtype)
        return self._probes[key]

    def _make_probe(self, roof: str, device: str, dtype: str) -> Probe | None:
        if roof == "none":
            return None
        if device == "cpu":
            return flops_probe() if roof == "flops" else read_probe()
        watch = self._stopwatch(device)
        if roof == "flops":
            return Probe("matmul", *gpu.product(device, DTYPES[dtype]), stopwatch=watch)
        return Probe("copy", *gpu.copy(device), stopwatch=watch)


def run(
    preset: Preset,
    *,
    memory: bool = True,
    threads: int | None = None,
    progress: Callable[[str], object] | None = None,
) -> Results:
    """Measure all tasks of a preset.

    Args:
        preset: what to measure, e.g. ``PRESETS["quick"]``.
        memory: also measure peak memory, each in a child process.
        threads: of PyTorch, while measuring; as it is when None.
        progress: called with a line of text before each comparison.
    """
    before = torch.get_num_threads()
    rows: list[Row] = []
    try:
        torch.set_num_threads(threads or before)
        with Workshop(preset.settings, memory=memory) as workshop:
            for task in preset.tasks:
                if progress is not None:
                    progress(task.group)
                rows += workshop.measure(task)
            return workshop.results(rows)
    finally:
        torch.set_num_threads(before)


def chosen(task: Task, wanted: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Of the wanted implementations those that can do a task, and the reason for each that cannot.

    Raises:
        ValueError: no suite knows one of them, or this one has no such operation.
    """
    suite = SUITES.get(task.suite)
    if suite is None or task.operation not in suite.operations:
        known = ", ".join(SUITES) if suite is None else ", ".join(suite.operations)
        found = task.suite if suite is None else task.operation
        raise ValueError(
            f"{'operation' if suite else 'suite'} is {found!r}, expected one of {known}"
        )
    own = suite.names(task.operation)
    for name in wanted:
        check_name(name)
    names = [
        name
        for name in (wanted or own)
        if name in own or (name.startswith("attnkit:") and task.suite in FORCEABLE)
    ]
    reasons = {name: suite.refusal(name, task.case, task.operation) for name in names}
    able = [name for name, reason in reasons.items() if reason is None]
    return able, {name: reason for name, reason in reasons.items() if reason is not None}


def check_name(name: str) -> None:
    """Raise ValueError for an implementation that no suite knows."""
    known = {*IMPLEMENTATIONS, *USUAL}
    if name not in known and not name.startswith("attnkit:"):
        raise ValueError(
            f"implementation is {name!r}, expected one of "
            f"{', '.join(sorted(known))}, attnkit:<backend>"
        )


def everywhere(*cases: Case, dtypes: str = "fp32 bf16", which: str = "full causal") -> list[Case]:
    """Each case with each dtype and mask."""
    return [
        replace(case, dtype=dtype, mask=mask)
        for dtype in dtypes.split()
        for case in cases
        for mask in which.split()
    ]
