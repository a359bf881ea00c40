"""The file format of measurements, and the table made of them.

Version 1 of the format, one JSON object::

    schema     "attnkit.benchmark"
    version    1; grows when a field changes its meaning or goes away
    created    date and time, ISO 8601 with the offset from UTC
    machine    see machine.Machine
    versions   see machine.Versions
    commit     of attnkit's checkout, "+changes" if edited; null where there is none
    settings   rounds, min_time, seed, preset, ...: how it was measured
    rows       see Row; one for each implementation, operation and case
    skipped    case, operation, implementation and the reason, for what was asked but not timed

Fields may be added within a version, and readers ignore fields that they do not know.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from attnkit.benchmark.machine import (
    Machine,
    Versions,
    describe_machine,
    describe_versions,
    git_commit,
    headline,
)
from attnkit.benchmark.probes import Peak
from attnkit.benchmark.timing import Ratio, Samples, paired_ratio

SCHEMA = "attnkit.benchmark"
VERSION = 1

_T = TypeVar("_T")


@dataclass(frozen=True)
class Row:
    """One implementation doing one operation on one case.

    Rows of one ``group`` were timed against each other: the samples of round r belong together.
    """

    group: str
    operation: str  # forward, backward, step
    implementation: str  # attnkit, torch, naive, ...
    backend: str  # that ran; the implementation's name where it has no backends
    shape: dict[str, int]
    dtype: str
    mask: str
    device: str
    seconds: tuple[float, ...]  # per call, the median of each round
    best: float  # seconds of the fastest call
    batch: int  # calls between two looks at the clock
    flops: float  # of one call, by the formula of Case.flops
    peak: Peak | None = None  # FLOP/s, probed in the same rounds
    errors: dict[str, float] = field(default_factory=dict)  # largest row error against float64
    extra_bytes: int | None = None  # peak memory beyond the inputs
    memory_method: str | None = None  # hwm or maxrss, see memory.MemoryUse
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> Samples:
        """The timings as ``compare`` gave them."""
        return Samples(self.seconds, self.best, self.batch)

    @property
    def gflops(self) -> float:
        """Achieved GFLOP/s of the fastest call."""
        return self.flops / self.best / 1e9

    @property
    def share_of_peak(self) -> float | None:
        """The fastest call's rate as a part of the fastest probe's."""
        return None if self.peak is None else self.flops / self.best / self.peak.best

    def to_dict(self) -> dict[str, Any]:
        """The fields, and beside them what follows from them, for readers without this package."""
        derived = {
            "median": self.samples.median,
            "gflops": self.gflops,
            "share_of_peak": self.share_of_peak,
        }
        return asdict(self) | derived

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Row:
        """The inverse of ``to_dict``."""
        row = _known(cls, data)
        peak = row.get("peak")
        row["peak"] = None if peak is None else Peak(**_known(Peak, peak))
        return cls(**(row | {"seconds": tuple(row["seconds"])}))


@dataclass(frozen=True)
class Results:
    """Everything one run measured, and where."""

    created: str
    machine: Machine
    versions: Versions
    commit: str | None
    settings: dict[str, Any]
    rows: tuple[Row, ...]
    skipped: tuple[dict[str, str], ...] = ()

    @classmethod
    def here(
        cls,
        rows: Iterable[Row],
        settings: Mapping[str, Any],
        skipped: Iterable[dict[str, str]] = (),
    ) -> Results:
        """Results of this machine, now."""
        return cls(
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            machine=describe_machine(),
            versions=describe_versions(),
            commit=git_commit(),
            settings=dict(settings),
            rows=tuple(rows),
            skipped=tuple(skipped),
        )

    def to_json(self) -> str:
        """The text of the file."""
        head = {"schema": SCHEMA, "version": VERSION}
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        body |= {
            "machine": asdict(self.machine),
            "versions": asdict(self.versions),
            "rows": [row.to_dict() for row in self.rows],
        }
        return json.dumps(head | body, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: not a result file, or of a version that this code does not know.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"schema is {found!r}, expected {SCHEMA!r}")
        if data.get("version") != VERSION:
            raise ValueError(f"version is {data.get('version')!r}, expected {VERSION}")
        machine = _known(Machine, data["machine"])
        for name in ("flags", "gpus"):
            machine[name] = tuple(machine[name])
        return cls(
            created=data["created"],
            machine=Machine(**machine),
            versions=Versions(**_known(Versions, data["versions"])),
            commit=data["commit"],
            settings=data["settings"],
            rows=tuple(Row.from_dict(row) for row in data["rows"]),
            skipped=tuple(data["skipped"]),
        )

    def save(self, path: str | Path) -> None:
        """Write ``to_json()`` to ``path``; missing folders are made."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Results:
        """Read a file that ``save`` wrote; errors as ``from_json``."""
        return cls.from_json(Path(path).read_text())

    def ratio(self, row: Row, baseline: str = "torch") -> Ratio | None:
        """How many times faster ``row`` is than the baseline of its group, None without one."""
        for other in self.rows:
            if other.group == row.group and other.implementation == baseline:
                return paired_ratio(row.samples, other.samples)
        return None


def markdown(results: Results, baseline: str = "torch") -> str:
    """A table of the rows, with the machine above and what was skipped below."""
    lines = [
        f"{headline(results.machine, results.versions)}; {results.created}",
        "",
        "| case | operation | implementation | median ms | best ms | GF/s | of peak "
        f"| x {baseline} (middle half) | extra MiB | row error |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
        *(_line(results, row, baseline) for row in results.rows),
    ]
    kinds = sorted({row.peak.kind for row in results.rows if row.peak})
    if kinds:
        lines += ["", f"Peak: {', '.join(kinds)}, probed in the same rounds."]
    lines += [
        f"Skipped: {s['case']} {s['operation']} {s['implementation']}: {s['reason']}."
        for s in results.skipped
    ]
    return "\n".join(lines) + "\n"


def _line(results: Results, row: Row, baseline: str) -> str:
    name = row.implementation
    if row.backend not in row.implementation:
        name += f" ({row.backend})"
    ratio, share = results.ratio(row, baseline), row.share_of_peak
    cells = [
        row.group.removesuffix(" " + row.operation),
        row.operation,
        name,
        f"{row.samples.median * 1e3:.3g}",
        f"{row.best * 1e3:.3g}",
        f"{row.gflops:.3g}",
        "" if share is None else f"{share:.0%}",
        "" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
        "" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:.1f}",
        f"{max(row.errors.values()):.1e}" if row.errors else "",
    ]
    return "| " + " | ".join(cells) + " |"


def _known(kind: type[_T], data: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of ``data`` that are fields of the dataclass ``kind``."""
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return {name: value for name, value in data.items() if name in names}
