"""Examples in batches of so many tokens, of similar lengths, in an order that the seed decides."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_POOL = 64  # batches that are sorted by length together: a batch still mixes the examples


@dataclass(frozen=True)
class Examples:
    """Columns of equal length: for each example a row of token ids, or one number (a label).

    Raises:
        ValueError: columns of different lengths.
    """

    columns: tuple[Sequence[Any], ...]
    pad_id: int = 0

    def __post_init__(self) -> None:
        if len({len(column) for column in self.columns}) > 1:
            raise ValueError(f"columns have {[len(c) for c in self.columns]} rows: not the same")

    def __len__(self) -> int:
        return len(self.columns[0])

    @property
    def lengths(self) -> list[int]:
        """Tokens of each example: of its longest row."""
        rows = zip(*self.columns, strict=True)
        return [max(1 if isinstance(x, int) else len(x) for x in row) for row in rows]

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """The examples as tensors, int64: [B, longest] padded on the right, or [B]."""
        picked = ([column[i] for i in indices] for column in self.columns)
        return tuple(
            torch.tensor(some) if isinstance(some[0], int) else pad_batch(some, self.pad_id)
            for some in picked
        )

    def fingerprint(self) -> int:
        """A number that differs when examples do: a resumed run asks whether the data is the same.

        Stable from process to process, and not meant to withstand ill will.
        """
        code = 0
        for column in self.columns:
            for item in column:
                text = repr(item if isinstance(item, int) else list(item))
                code = zlib.crc32(text.encode(), code)
        return code


def pad_batch(rows: Sequence[Sequence[int]], pad_id: int) -> Tensor:
    """``rows`` as one int64 tensor [len(rows), longest], filled up with ``pad_id`` on the right."""
    padded = torch.full((len(rows), max(map(len, rows), default=0)), pad_id)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return padded


def token_batches(
    lengths: Sequence[int], batch_tokens: int, rng: random.Random | None = None
) -> list[list[int]]:
    """Every example once, in batches with count * longest <= ``batch_tokens``.

    Without ``rng`` they are sorted by length; with one they are sorted in random pools of some
    batches only, and the batches come in random order.  An example longer than ``batch_tokens`` is
    a batch of its own.
    """
    order = list(range(len(lengths)))
    pool = len(order)
    if rng is not None:
        rng.shuffle(order)
        pool = max(1, _POOL * batch_tokens * len(order) // max(1, sum(lengths)))
    batches: list[list[int]] = []
    for start in range(0, len(order), max(1, pool)):
        # the sort is stable: equal lengths stay in random order
        some = sorted(order[start : start + pool], key=lengths.__getitem__)
        batch: list[int] = []
        for i in some:
            if batch and (len(batch) + 1) * lengths[i] > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(i)
        batches.append(batch)
    if rng is not None:
        rng.shuffle(batches)
    return batches


class Position(NamedTuple):
    """Where a run is in its data: passes done, and batches of this pass."""

    epoch: int = 0
    batch: int = 0


def batches_from(
    position: Position, lengths: Sequence[int], batch_tokens: int, seed: int
) -> Iterator[tuple[Position, list[int]]]:
    """The training batches from ``position`` on, without end, each with the position after it.

    A pass's order is a function of the seed and the number of the pass: a position is all that a
    checkpoint has to keep.
    """
    epoch, first = position
    while True:
        every = token_batches(lengths, batch_tokens, random.Random(f"{seed}/{epoch}"))
        for number in range(first, len(every)):
            yield Position(epoch, number + 1), every[number]
        epoch, first = epoch + 1, 0
