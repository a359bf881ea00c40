"""The suites on pytest-benchmark, with the clock of attnkit.benchmark.

pytest-benchmark times one test after the other, minutes apart.  Here the first test of a group
(one case, one operation) checks and times all implementations against each other, in interleaved
rounds; then every test hands its own samples to pytest-benchmark, which prints, saves and compares
them as it does with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from attnkit import benchmark as engine

RESULTS = Path(__file__).resolve().parent / "results"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attnkit")
    presets = sorted(engine.PRESETS)
    group.addoption("--preset", choices=presets, default="quick", help="which cases (quick)")
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
    """What was measured so far; each group once, when its first test asks."""

    def __init__(self, config: pytest.Config) -> None:
        self.name: str = config.getoption("preset")
        self.preset = engine.PRESETS[self.name]
        self.memory: bool = not config.getoption("no_memory")
        self.rows: dict[tuple[engine.Case, str], dict[str, engine.Row]] = {}
        self.skipped: list[dict[str, str]] = []
        self._subject: engine.Subject | None = None
        self._probe: engine.Probe | None = None
        self._meter = engine.MemoryMeter(config.getoption("threads")).__enter__()

    def subject(self, case: engine.Case) -> engine.Subject:
        if self._subject is None or self._subject.case != case:
            self._subject = engine.Subject.of(case, self.preset.settings.seed)
        return self._subject

    def measured(self, case: engine.Case, operation: str) -> dict[str, engine.Row]:
        if (case, operation) not in self.rows:
            names, reasons = engine.feasible(case, self.preset.settings.implementations)
            for name, reason in reasons.items():
                where = {"case": case.label, "operation": operation}
                self.skipped.append({**where, "implementation": name, "reason": reason})
            self._probe = self._probe or engine.flops_probe()
            settings = replace(self.preset.settings, implementations=names)
            meter = self._meter if self.memory else None
            rows = engine.measure(
                self.subject(case), operation, settings, probe=self._probe, meter=meter
            )
            self.rows[case, operation] = {row.implementation: row for row in rows}
        return self.rows[case, operation]

    def results(self) -> engine.Results:
        settings = asdict(self.preset.settings)
        settings["implementations"] = list(self.preset.settings.implementations)
        rows = [row for group in self.rows.values() for row in group.values()]
        return engine.Results.here(rows, {"preset": self.name, **settings}, self.skipped)

    def close(self) -> None:
        self._meter.__exit__()


SESSION = pytest.StashKey[Session]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each case of the preset and implementation, those of a case side by side."""
    if {"case", "implementation"} <= set(metafunc.fixturenames):
        preset = metafunc.config.stash[SESSION].preset
        pairs = [(c, name) for c in preset.cases for name in preset.settings.implementations]
        ids = [f"{case.label} {name}".replace(" ", "-") for case, name in pairs]
        metafunc.parametrize(("case", "implementation"), pairs, ids=ids)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        if "implementation" in values:
            operation = item.originalname.removeprefix("test_")  # type: ignore[attr-defined]
            group = f"{values['case'].label} {operation}"
            item.add_marker(pytest.mark.benchmark(group=group, timer=Replay()))


@pytest.fixture(scope="session", autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.config.getoption("threads") or before)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def record(
    request: pytest.FixtureRequest, benchmark: object
) -> Callable[[engine.Case, str, str], None]:
    """Check one implementation of a case and, unless disabled, report its times and its memory."""
    session = request.config.stash[SESSION]
    timer = request.node.get_closest_marker("benchmark").kwargs["timer"]

    def run(case: engine.Case, operation: str, implementation: str) -> None:
        reason = engine.feasible(case, [implementation])[1].get(implementation)
        if benchmark.disabled:  # type: ignore[attr-defined]
            if reason is not None:
                pytest.skip(reason)
            engine.check_all(session.subject(case), operation, [implementation])
            timer.load([0.0])
            benchmark.pedantic(lambda: None)  # type: ignore[attr-defined]
            return
        rows = session.measured(case, operation)
        if reason is not None:
            pytest.skip(reason)
        row = rows[implementation]
        timer.load(row.seconds)
        benchmark.pedantic(lambda: None, rounds=len(row.seconds))  # type: ignore[attr-defined]
        benchmark.extra_info.update(  # type: ignore[attr-defined]
            backend=row.backend,
            best_seconds=row.best,
            gflops=row.gflops,
            share_of_peak=row.share_of_peak,
            times_torch=row_ratio(rows, implementation),
            extra_bytes=row.extra_bytes,
            tensor_bytes=case.tensor_bytes(),
            row_errors=row.errors,
        )

    return run


def row_ratio(rows: dict[str, engine.Row], implementation: str) -> float:
    return engine.paired_ratio(rows[implementation].samples, rows["torch"].samples).median


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    session = config.stash[SESSION]
    session.close()
    if not session.rows:
        return
    results = session.results()
    path = config.getoption("results") or RESULTS / f"latest-{session.name}.json"
    results.save(path)
    terminalreporter.write_line("")
    terminalreporter.write_line(engine.markdown(results))
    terminalreporter.write_line(f"written to {path}")
