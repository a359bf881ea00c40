"""What a suite is made of: tasks, the contests in which they are done, and how work is handed over.

A ``Task`` is something to do, in numbers.  Its suite makes a ``Contest`` of it: tensors, truth, and
one ``Work`` for each implementation that takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from attnkit.benchmark.cases import Case


@dataclass(frozen=True)
class Task:
    """``operation`` of ``suite`` on a case."""

    suite: str
    operation: str
    case: Case

    @property
    def group(self) -> str:
        """The name under which its rows are compared, unique within results."""
        own = f"{self.case.label} {self.operation}"
        return own if self.suite == self.operation else f"{self.suite} {own}"


class Work(NamedTuple):
    """An operation of one implementation, ready to be timed or checked."""

    call: Callable[[], object]
    results: Callable[[], tuple[Tensor, ...]]  # (out,) or (out, dq, dk, dv, ...)
    bytes: float | None = None  # that a call reads and writes, where that is what bounds it
    extra: dict[str, float] | None = None  # more to be noted: tokens, compile_seconds


class Contest(Protocol):
    """The inputs of a task and its truth, made once for all implementations."""

    def prepare(self, name: str, operation: str) -> Work:
        """The work of one implementation."""

    def check(self, name: str, operation: str, results: Sequence[Tensor]) -> dict[str, float]:
        """The errors of its results by name; raises WrongResult if one is too large."""

    def ran(self, name: str) -> str:
        """The backend that serves an implementation."""


class Suite(NamedTuple):
    """A kind of task.

    ``roof`` says what bounds it, and so which probe runs beside it: ``flops``, ``bytes`` or
    ``none`` (where most of the time is spent elsewhere).
    """

    summary: str
    operations: tuple[str, ...]
    names: Callable[[str], tuple[str, ...]]  # of all that know how to do an operation
    refusal: Callable[[str, Case, str], str | None]  # (name, case, operation): the reason
    contest: Callable[[Case, int], Contest]  # (case, seed)
    flops: Callable[[Case, str], float]
    roof: str
    memory: bool = False  # whether the peak memory of its work says something
