"""Reading the text files that recipes are given, and parting what they hold for tests."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from attnkit.recipes.options import UsageError

Item = TypeVar("Item")


def read_text(path: Path, name: str) -> str:
    """The text of a UTF-8 file that is not empty; ``name`` is the option that gave its path.

    Raises:
        UsageError: no such file, no text in it, or text of another encoding.
    """
    if not path.is_file():
        raise UsageError(f"{name} {path} is not a file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} {path} is not UTF-8 text: {error}") from error
    if not text.strip():
        raise UsageError(f"{name} {path} is empty")
    return text


def read_lines(path: Path, name: str) -> list[str]:
    """The lines of :func:`read_text`, without white space around them."""
    # by "\n" alone: str.splitlines knows ends of lines that occur within a sentence
    return [line.strip() for line in read_text(path, name).rstrip("\n").split("\n")]


class Parts(NamedTuple):
    """Indices of the examples to train on, to validate with, and to test with."""

    training: list[int]
    validation: list[int]
    test: list[int]


def parted(keys: Sequence[Hashable], weights: Sequence[int], seed: int, share: float) -> Parts:
    """About ``share`` of all examples for the test, as much for validation, the rest to train on.

    Examples with equal keys stay together, so that nothing that is tested was seen before.

    Args:
        keys: of each example: its source text, its document, its subject.
        weights: the size of each.
        seed: of the choice.
        share: of the sum of weights.

    Raises:
        UsageError: fewer than three different keys.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    if len(groups) < 3:
        raise UsageError(
            f"there are {len(groups)} different examples, expected at least 3: "
            "some to train on, some to validate with, some for the test"
        )
    order = list(groups)
    random.Random(seed).shuffle(order)
    parts: list[list[int]] = []
    wanted = share * sum(weights)
    for spare in (2, 1):  # keys that the parts after this one need at least
        part: list[int] = []
        while len(order) > spare and (not part or sum(weights[i] for i in part) < wanted):
            part += groups[order.pop()]
        parts.append(sorted(part))
    test, validation = parts
    return Parts(sorted(i for key in order for i in groups[key]), validation, test)
