"""The suites on pytest-benchmark, with the clock of attnkit.benchmark.

pytest-benchmark times one test after the other, minutes apart.  Here the first test of a group
(one task) checks and times all implementations against each other, in interleaved
rounds; then every test hands its own samples to pytest-benchmark, which prints, saves and compares
them as it does with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from attnkit import benchmark as engine

RESULTS = Path(__file__).resolve().parent / "results"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attnkit")
    presets = sorted(engine.PRESETS)
    group.addoption("--preset", choices=presets, default="quick", help="which cases (quick)")
    group.addoption("--suites", nargs="+", choices=sorted(engine.SUITES), help="only these (all)")
    group.addoption("--threads", type=int, help="threads of PyTorch (all cores)")
    group.addoption("--no-memory", action="store_true", help="leave out the peak memory")
    group.addoption("--results", type=Path, help="result file (bench/results/latest-PRESET.json)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("python_files", "bench_*.py")
    config.stash[SESSION] = Session(config)


class Replay:
    """A timer that returns times measured before: 0, then a round's seconds, and so on."""

    def __init__(self) -> None:
        self._times: Iterator[float] = iter(())

    def load(self, seconds: Sequence[float]) -> None:
        self._times = (time for sample in seconds for time in (0.0, sample))

    def __call__(self) -> float:
        return next(self._times)


class Session:
    """What was measured so far; each task once, when its first test asks."""

    def __init__(self, config: pytest.Config) -> None:
        self.name: str = config.getoption("preset")
        suites = config.getoption("suites")
        preset = engine.PRESETS[self.name]
        self.settings = preset.settings
        self.tasks = [task for task in preset.tasks if not suites or task.suite in suites]
        memory = not config.getoption("no_memory")
        self.workshop = engine.Workshop(preset.settings, memory=memory).__enter__()
        self.rows: dict[engine.Task, dict[str, engine.Row]] = {}

    def measured(self, task: engine.Task) -> dict[str, engine.Row]:
        if task not in self.rows:
            rows = self.workshop.measure(task)
            self.rows[task] = {row.implementation: row for row in rows}
        return self.rows[task]

    def results(self) -> engine.Results:
        rows = [row for group in self.rows.values() for row in group.values()]
        return self.workshop.results(rows, preset=self.name)


SESSION = pytest.StashKey[Session]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each task of the preset and implementation, those of a task side by side."""
    if {"task", "implementation"} <= set(metafunc.fixturenames):
        session = metafunc.config.stash[SESSION]
        wanted = session.settings.implementations
        pairs = [(t, name) for t in session.tasks for name in engine.chosen(t, wanted)[0]]
        ids = [f"{task.group} {name}".replace(" ", "-") for task, name in pairs]
        metafunc.parametrize(("task", "implementation"), pairs, ids=ids)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        if "implementation" in values:
            item.add_marker(pytest.mark.benchmark(group=values["task"].group, timer=Replay()))


@pytest.fixture(scope="session", autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.config.getoption("threads") or before)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def record(request: pytest.FixtureRequest, benchmark: object) -> Callable[[engine.Task, str], None]:
    """Check one implementation of a task and, unless disabled, report its times and its memory."""
    session = request.config.stash[SESSION]
    timer = request.node.get_closest_marker("benchmark").kwargs["timer"]

    def run(task: engine.Task, implementation: str) -> None:
        if benchmark.disabled:  # type: ignore[attr-defined]
            session.workshop.check(task, implementation)
            timer.load([0.0])
            benchmark.pedantic(lambda: None)  # type: ignore[attr-defined]
            return
        row = session.measured(task).get(implementation)
        if row is None:
            pytest.skip(session.workshop.skipped[-1]["reason"])
        timer.load(row.seconds)
        benchmark.pedantic(lambda: None, rounds=len(row.seconds))  # type: ignore[attr-defined]
        ratio = session.results().ratio(row)
        benchmark.extra_info.update(  # type: ignore[attr-defined]
            backend=row.backend,
            best_seconds=row.best,
            gflops=row.gflops,
            gigabytes=row.gigabytes,
            share_of_peak=row.share_of_peak,
            times_baseline=None if ratio is None else ratio.median,
            extra_bytes=row.extra_bytes,
            tensor_bytes=task.case.tensor_bytes(),
            row_errors=row.errors,
        )

    return run


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    session = config.stash[SESSION]
    session.workshop.__exit__()
    if not session.rows:
        return
    results = session.results()
    path = config.getoption("results") or RESULTS / f"latest-{session.name}.json"
    results.save(path)
    terminalreporter.write_line("")
    terminalreporter.write_line(engine.markdown(results))
    terminalreporter.write_line(f"written to {path}")
