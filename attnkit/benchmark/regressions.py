"""Did attnkit become slower between two result files?

Seconds of two runs cannot be compared: the machine was another, or in another mood.  So each run
brings its own yardsticks, the implementations of others that were timed in the same rounds.  Of
every round the logarithm of (attnkit / yardstick) is taken; a row's change is the difference
between the medians of the two runs, or the mean of these where there are several yardsticks.  It
counts when it is larger than 10% and than three standard errors of that difference, which are
estimated from how far the rounds lie apart (by their median absolute deviation, so that single
interrupted rounds count little).  Fifteen rounds on either side tell a fifth from nothing on a
machine that is interrupted in one of ten; fewer will do on a quiet one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from attnkit.benchmark.results import Results, Row

LEAST = 0.10  # a smaller change is not reported: another build moves code by as much
ERRORS = 3.0  # standard errors that a change has to exceed
MEDIAN_ERROR = 1.2533  # of a median of normal numbers, relative to that of their mean
NORMAL_MAD = 1.4826  # standard deviation of normal numbers, relative to their MAD
UNSURE = 0.20  # noise that would hide so much is worth a word


@dataclass(frozen=True)
class Change:
    """What became of one row."""

    group: str
    implementation: str
    factor: float  # new time over old time: above 1 is slower
    threshold: float  # the factor from which on it counts
    yardstick: tuple[str, ...]  # () without one: then seconds are compared as they are

    @property
    def verdict(self) -> str:
        """``slower``, ``faster``, ``same``, or ``too noisy`` to tell 20%."""
        if self.factor >= self.threshold:
            return "slower"
        if self.factor <= 1 / self.threshold:
            return "faster"
        return "too noisy" if self.threshold > 1 + UNSURE else "same"


def changes(old: Results, new: Results) -> list[Change]:
    """The change of every row of attnkit that both files have, in the order of the new one."""
    before = {(row.group, row.implementation): row for row in old.rows}
    found = []
    for row in new.rows:
        other = before.get((row.group, row.implementation))
        if other is None or not _ours(row):
            continue
        names = _yardstick(old, row.group) & _yardstick(new, row.group)
        shifts, deviations = [], []
        beside: Sequence[str | None] = sorted(names) or [None]
        for name in beside:
            logs = [_logs(results, one, name) for results, one in ((old, other), (new, row))]
            shifts.append(statistics.median(logs[1]) - statistics.median(logs[0]))
            deviations.append(_standard_error(*logs))
        shift = statistics.mean(shifts)
        threshold = max(math.log1p(LEAST), ERRORS * statistics.mean(deviations))
        found.append(
            Change(
                row.group,
                row.implementation,
                math.exp(shift),
                math.exp(threshold),
                tuple(sorted(names)),
            )
        )
    return found


def unmatched(old: Results, new: Results) -> list[str]:
    """Rows of attnkit that only one of the files has, a sentence each."""
    keys = [
        {(row.group, row.implementation) for row in one.rows if _ours(row)} for one in (old, new)
    ]
    gone = [f"{group}, {name}: only in the old file" for group, name in sorted(keys[0] - keys[1])]
    come = [f"{group}, {name}: only in the new file" for group, name in sorted(keys[1] - keys[0])]
    return gone + come


def report(old: Results, new: Results) -> tuple[str, int]:
    """A table of the changes, and the exit status: 1 if a row became slower, 2 if none compares."""
    found = changes(old, new)
    lines = [
        f"old: {old.created}, {old.machine.cpu}, commit {old.commit}",
        f"new: {new.created}, {new.machine.cpu}, commit {new.commit}",
        "",
    ]
    if old.machine.cpu != new.machine.cpu or old.machine.threads != new.machine.threads:
        lines.append("WARNING: the machines differ; yardsticks may not move as attnkit does.")
    if old.versions.torch != new.versions.torch:
        lines.append("WARNING: the versions of torch differ, and torch is a yardstick.")
    width = max((len(change.group) for change in found), default=0)
    for change in found:
        mark = {"slower": "!!", "faster": "++", "too noisy": "? "}.get(change.verdict, "  ")
        beside = " and ".join(change.yardstick) or "nothing: seconds as they are"
        lines.append(
            f"{mark} {change.group:{width}}  {change.implementation}: {change.factor:.2f} x the "
            f"time ({change.verdict}; counts from {change.threshold:.2f} on; beside {beside})"
        )
    lines += unmatched(old, new)
    count = {
        verdict: sum(change.verdict == verdict for change in found)
        for verdict in ("slower", "faster", "too noisy", "same")
    }
    lines += ["", ", ".join(f"{number} {verdict}" for verdict, number in count.items())]
    if not found:
        lines[-1] = "no row of attnkit is in both files"
        return "\n".join(lines), 2
    return "\n".join(lines), int(count["slower"] > 0)


def _ours(row: Row) -> bool:
    return row.implementation.startswith("attnkit")


def _yardstick(results: Results, group: str) -> set[str]:
    """Others that took part in a group."""
    return {row.implementation for row in results.rows if row.group == group and not _ours(row)}


def _logs(results: Results, row: Row, yardstick: str | None) -> list[float]:
    """Of each round the logarithm of the row's time, relative to the yardstick's if any."""
    ratio = None if yardstick is None else results.ratio(row, yardstick)
    if ratio is None:
        return [math.log(seconds) for seconds in row.seconds]
    return [-math.log(times) for times in ratio.rounds]


def _standard_error(old: Sequence[float], new: Sequence[float]) -> float:
    """Of the difference of two medians, for rounds that scatter alike in both runs."""
    spread = [abs(x - statistics.median(logs)) for logs in (old, new) for x in logs]
    if len(spread) <= 2:
        return 0.0
    correction = math.sqrt(len(spread) / (len(spread) - 2))  # two medians were fitted
    deviation = NORMAL_MAD * statistics.median(spread) * correction
    return MEDIAN_ERROR * deviation * math.sqrt(1 / len(old) + 1 / len(new))
