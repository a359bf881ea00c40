"""The file format of measurements, and the table made of them.

Version 2 of the format, one JSON object::

    schema     "attnkit.benchmark"
    version    2; grows when a field changes its meaning or goes away
    created    date and time, ISO 8601 with the offset from UTC
    machine    see machine.Machine
    versions   see machine.Versions
    commit     of attnkit's checkout, "+changes" if edited; null where there is none
    settings   rounds, min_time, seed, preset, ...: how it was measured
    rows       see Row; one for each implementation, operation and case
    skipped    case, operation, implementation and the reason, for what was asked but not timed

Fields may be added within a version, and readers ignore fields that they do not know.

Version 1, which is read as well, had neither ``suite`` nor ``bytes``, and peaks of FLOP/s alone.
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
VERSION = 2
READABLE = (1, 2)
BASELINES = ("attnkit-plain", "torch", "hf:sdpa")  # of a group, the first that took part

_T = TypeVar("_T")


@dataclass(frozen=True)
class Row:
    """One implementation doing one operation on one case.

    Rows of one ``group`` were timed against each other: the samples of round r belong together.
    """

    group: str
    operation: str  # of the suite: forward, backward, step, decode, ...
    implementation: str  # attnkit, torch, naive, ...
    backend: str  # that ran; the implementation's name where it has no backends
    shape: dict[str, int]
    dtype: str
    mask: str
    device: str
    seconds: tuple[float, ...]  # per call, the median of each round
    best: float  # seconds of the fastest call
    batch: int  # calls between two looks at the clock
    flops: float  # of one call, by the formula of Case.flops; 0 where there is none
    peak: Peak | None = None  # FLOP/s, or bytes/s where bytes bound it, probed in the same rounds
    errors: dict[str, float] = field(default_factory=dict)  # largest row error against float64
    extra_bytes: int | None = None  # peak memory beyond the inputs
    memory_method: str | None = None  # hwm or maxrss, see memory.MemoryUse
    extra: dict[str, Any] = field(default_factory=dict)  # tokens of a call, compile_seconds
    suite: str = ""  # that it belongs to; the operation's name in version 1
    bytes: float | None = None  # of one call, where they bound it: caches, queries, output

    @property
    def samples(self) -> Samples:
        """The timings as ``compare`` gave them."""
        return Samples(self.seconds, self.best, self.batch)

    @property
    def gflops(self) -> float:
        """Achieved GFLOP/s of the fastest call."""
        return self.flops / self.best / 1e9

    @property
    def gigabytes(self) -> float | None:
        """Achieved GB/s of the fastest call."""
        return None if self.bytes is None else self.bytes / self.best / 1e9

    @property
    def share_of_peak(self) -> float | None:
        """The fastest call's rate as a part of the fastest probe's."""
        if self.peak is None:
            return None
        work = self.bytes if self.peak.unit == "B/s" else self.flops
        return work / self.best / self.peak.best if work else None

    def to_dict(self) -> dict[str, Any]:
        """The fields, and beside them what follows from them, for readers without this package."""
        derived = {
            "median": self.samples.median,
            "gflops": self.gflops,
            "gigabytes": self.gigabytes,
            "share_of_peak": self.share_of_peak,
        }
        return asdict(self) | derived

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Row:
        """The inverse of ``to_dict``."""
        row = _known(cls, data)
        peak = row.get("peak")
        row["peak"] = None if peak is None else Peak(**_known(Peak, peak))
        suite = row.get("suite") or row["operation"]
        return cls(**(row | {"seconds": tuple(row["seconds"]), "suite": suite}))


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
        if data.get("version") not in READABLE:
            known = " or ".join(map(str, READABLE))
            raise ValueError(f"version is {data.get('version')!r}, expected {known}")
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

    def baseline(self, group: str) -> str | None:
        """Whom the others of a group are compared with: the first of BASELINES that took part."""
        present = {row.implementation for row in self.rows if row.group == group}
        return next((name for name in BASELINES if name in present), None)

    def ratio(self, row: Row, baseline: str | None = None) -> Ratio | None:
        """How many times faster ``row`` is than the baseline of its group, None without one."""
        baseline = baseline or self.baseline(row.group)
        for other in self.rows:
            if other.group == row.group and other.implementation == baseline:
                return paired_ratio(row.samples, other.samples)
        return None


def markdown(results: Results) -> str:
    """A table of the rows, with the machine above and what was skipped below."""
    baselines = {results.baseline(row.group) for row in results.rows} - {None}
    lines = [
        f"{headline(results.machine, results.versions)}; {results.created}",
        "",
        "| case | operation | implementation | median ms | best ms | GF/s, or as said | of peak "
        f"| x {baselines.pop() if len(baselines) == 1 else 'baseline'} (middle half) | extra MiB "
        "| row error |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
        *("| " + " | ".join(cells(results, row)) + " |" for row in results.rows),
    ]
    kinds = sorted({row.peak.kind for row in results.rows if row.peak})
    if kinds:
        lines += ["", f"Peak: {', '.join(kinds)}, probed in the same rounds."]
    if baselines:
        lines += [f"Baseline: {', '.join(BASELINES)}; the first that took part, at 1.00."]
    lines += [
        f"Skipped: {s['case']} {s['operation']} {s['implementation']}: {s['reason']}."
        for s in results.skipped
    ]
    return "\n".join(lines) + "\n"


def cells(results: Results, row: Row) -> list[str]:
    """A row of the table, as text."""
    name = row.implementation
    if row.backend not in row.implementation:
        name += f" ({row.backend})"
    ratio, share = results.ratio(row), row.share_of_peak
    if row.gigabytes is not None:
        rate = f"{row.gigabytes:.3g} GB/s"
    elif "tokens" in row.extra:
        rate = f"{row.extra['tokens'] / row.samples.median:.3g} tokens/s"
    elif row.suite == "overhead":
        rate = f"{1e6 * row.samples.median:.3g} us"
    else:
        rate = f"{row.gflops:.3g}"
    return [
        row.group.removesuffix(" " + row.operation),
        row.operation,
        name,
        f"{row.samples.median * 1e3:.3g}",
        f"{row.best * 1e3:.3g}",
        rate,
        "" if share is None else f"{share:.0%}",
        "" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
        "" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:.1f}",
        f"{max(row.errors.values()):.1e}" if row.errors else "",
    ]


def _known(kind: type[_T], data: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of ``data`` that are fields of the dataclass ``kind``."""
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return {name: value for name, value in data.items() if name in names}
