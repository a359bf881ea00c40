"""What goes into a generation and what comes out of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from attnkit.masks import describe


class Session(Protocol):
    """R sequences that a model is continuing: all that generation knows of it.

    A session fresh from the model has a row per prompt.  Whatever it keeps (a cache, an encoded
    source) is its own affair, as is hiding the padding of a prompt.
    """

    def extend(self, tokens: Tensor) -> Tensor:
        """Add tokens, int64 [R, n], to the rows; logits [R, V] of what follows the last of each."""

    def reorder(self, rows: Tensor) -> None:
        """Row r goes on from what row ``rows[r]`` was; ``rows`` is int64 and need not have R.

        Rows of one prompt stay together and keep their place: of B prompts, B * K rows in all, the
        K of prompt b are those from b * K on, before and after.
        """


@dataclass(frozen=True)
class GenerationOptions:
    """What may be generated, how it is chosen, and what ends it.

    Args:
        max_length: the most tokens generated per row, the one that ends it included; from 0.
        eos_id: the token, or tokens, that end a row; None: nothing does.
        pad_id: what an ended row is filled with.  It is never generated, and its probability is
            not given to others.  None is for a model without padding: nothing is withheld, and rows
            are filled with the first ``eos_id``, or 0.
        num_beams: prefixes kept per prompt by beam search; 1 is greedy choice, or sampling.
        length_penalty: alpha in score = (sum of log-probabilities) / length ** alpha, where length
            counts the generated tokens, ``eos_id`` included.
        early_stopping: end a prompt's beam search when ``num_beams`` hypotheses have ended, even if
            one that goes on could still become the best.
        num_return_sequences: that many of the best hypotheses per prompt, at most ``num_beams``;
            None is the best alone, without a dimension for them in the output.
        min_length: the fewest tokens per row, ``eos_id`` included; until then ``eos_id`` is
            withheld and a ``stop`` sequence does not end the row.
        sample: draw each token in place of choosing the likeliest.
        temperature: above 0, the divisor of the logits when sampling; 0 is greedy choice.
        top_k: draw only from tokens than which fewer than that many are likelier.
        top_p: draw only from tokens than which those likelier have less than that mass together.
        min_p: draw only from tokens at least that times as likely as the likeliest.
        repetition_penalty: from 1; the logit of a token that the row holds already, prompt included
            and padding not, is divided by it if positive and multiplied if negative.
        stop: sequences of token ids; a row ends when the last tokens *generated* equal one, which
            is kept and counts like ``eos_id``.
        seed: of all rows: row b is drawn with seed ``seed + b``, of 64 bits, as attention's.
        seeds: one for each row.  What a row draws depends on its seed, and not on the batch.
            Without either, seeds are drawn from torch's generator: ``torch.manual_seed`` rules.

    When sampling, the repetition penalty comes first, then what is withheld, temperature, top_k,
    top_p and min_p, each on what the one before has left, made to sum to 1.  Tokens that are
    equally likely are kept or dropped together.  None turns a filter off.

    Raises:
        TypeError, ValueError: an option of another type, out of range, or at odds with another.
    """

    max_length: int
    _: KW_ONLY
    eos_id: int | Sequence[int] | None = None
    pad_id: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    num_return_sequences: int | None = None
    min_length: int = 0
    sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop: Sequence[Sequence[int]] = ()
    seed: int | None = None
    seeds: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self._freeze()
        _integer("max_length", self.max_length, 0)
        _integer("min_length", self.min_length, 0, self.max_length, "max_length")
        _integer("num_beams", self.num_beams, 1)
        for name, low in (("pad_id", 0), ("top_k", 1), ("num_return_sequences", 1)):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), low)
        for seed in (self.seed, *(self.seeds or ())):
            if seed is not None:
                _integer("seed", seed, -(2**63), 2**64 - 1, "64 bits")
        for name in ("early_stopping", "sample"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {describe(getattr(self, name))}, expected a bool")
        _number("length_penalty", self.length_penalty, -math.inf)
        _number("temperature", self.temperature, 0.0)
        _number("repetition_penalty", self.repetition_penalty, 1.0)
        if self.top_p is not None:
            _number("top_p", self.top_p, 0.0, 1.0)
            if self.top_p == 0:
                raise ValueError("top_p is 0, expected more: no token would be left")
        if self.min_p is not None:
            _number("min_p", self.min_p, 0.0, 1.0)
        self._check_together()

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a row."""
        if self.eos_id is None:
            return ()
        return (self.eos_id,) if isinstance(self.eos_id, int) else tuple(self.eos_id)

    @property
    def fill_id(self) -> int:
        """What stands behind the end of a row."""
        return self.pad_id if self.pad_id is not None else next(iter(self.eos_ids), 0)

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn: a temperature of 0 leaves nothing to draw."""
        return self.sample and self.temperature > 0

    def check(self, prompt: Tensor) -> None:
        """Raise unless ``prompt`` is one that these options can be used with."""
        if not isinstance(prompt, Tensor) or prompt.dtype != torch.int64 or prompt.dim() != 2:
            raise ValueError(f"prompt is {describe(prompt)}, expected int64 [batch, tokens]")
        if prompt.shape[1] == 0:
            raise ValueError("prompt has 0 tokens, expected 1 or more, such as a bos")
        if self.seeds is not None and len(self.seeds) != prompt.shape[0]:
            raise ValueError(
                f"seeds are {len(self.seeds)}, expected {prompt.shape[0]}, one for each row"
            )

    def check_logits(self, logits: Tensor, rows: int) -> None:
        """Raise unless ``logits`` are of that many rows and of a vocabulary that has these ids."""
        if logits.dim() != 2 or logits.shape[0] != rows or not logits.is_floating_point():
            raise ValueError(f"the session's logits are {describe(logits)}, expected [{rows}, V]")
        named = [("pad_id", self.pad_id), *(("eos_id", i) for i in self.eos_ids)]
        named += [("stop", i) for sequence in self.stop for i in sequence]
        for name, token in named:
            if token is not None and token >= logits.shape[1]:
                raise ValueError(
                    f"{name} has {token}, expected less than {logits.shape[1]}, the vocabulary"
                )

    def _freeze(self) -> None:
        """Tuples in place of the lists that were given, which others could change."""
        if not isinstance(self.stop, Sequence) or isinstance(self.stop, str):
            raise TypeError(f"stop is {describe(self.stop)}, expected sequences of token ids")
        stop = tuple(_integers("stop", sequence, 0) for sequence in self.stop)
        if () in stop:
            raise ValueError("stop has an empty sequence, expected 1 or more tokens in each")
        object.__setattr__(self, "stop", stop)
        if self.seeds is not None:
            object.__setattr__(self, "seeds", _integers("seeds", self.seeds, -(2**63)))
        if isinstance(self.eos_id, int):
            _integer("eos_id", self.eos_id, 0)
        elif self.eos_id is not None:
            object.__setattr__(self, "eos_id", _integers("eos_id", self.eos_id, 0))

    def _check_together(self) -> None:
        if self.pad_id in self.eos_ids:
            raise ValueError(
                f"pad_id is {self.pad_id}, which eos_id is too, expected another token: "
                "None is for a model without padding"
            )
        if self.seed is not None and self.seeds is not None:
            raise ValueError(f"seed is {self.seed} and seeds are given, expected one of the two")
        if self.num_beams > 1 and self.sample:
            raise ValueError(
                f"sample is True and num_beams {self.num_beams}, expected 1: beams are not drawn"
            )
        if self.num_return_sequences is not None:
            _integer(
                "num_return_sequences", self.num_return_sequences, 1, self.num_beams, "num_beams"
            )


class GenerationOutput(NamedTuple):
    """What was generated; [B, N, T], [B, N] with ``num_return_sequences`` = N, best first.

    ========= ====== ====================================================================
    tokens    [B, T] int64; without the prompt; padding behind a row's end; T is the longest
    scores    [B]    float32 (float64 for a float64 model): sum of log_probs / length ** alpha
    lengths   [B]    int64: tokens generated, eos included
    log_probs [B, T] of each token, 0 at padding
    ========= ====== ====================================================================

    A log-probability is that of the model's own distribution: with the repetition penalty if there
    is one, before temperature and filters, and without what is withheld given to others.  Where
    fewer than N hypotheses exist, the others have length 0 and score -inf.
    """

    tokens: Tensor
    scores: Tensor
    lengths: Tensor
    log_probs: Tensor

    @classmethod
    def nothing(
        cls, batch: int, options: GenerationOptions, device: torch.device
    ) -> GenerationOutput:
        """What is generated where nothing may be: no tokens, with the score 0."""
        n = options.num_return_sequences
        size = (batch,) if n is None else (batch, n)
        return cls(
            torch.zeros(*size, 0, dtype=torch.int64, device=device),
            torch.zeros(size, device=device),
            torch.zeros(size, dtype=torch.int64, device=device),
            torch.zeros(*size, 0, device=device),
        )


def _integer(name: str, value: Any, low: int, high: int | None = None, high_name: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {describe(value)}, expected an int")
    if value < low:
        raise ValueError(f"{name} is {value}, expected {low} or more")
    if high is not None and value > high:
        raise ValueError(f"{name} is {value}, expected at most {high}, {high_name}")


def _integers(name: str, values: Any, low: int) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"{name} has {describe(values)}, expected a sequence of ints")
    for value in values:
        _integer(name, value, low)
    return tuple(values)


def _number(name: str, value: Any, low: float, high: float = math.inf) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} is {describe(value)}, expected a number")
    if not (low <= value <= high and math.isfinite(value)):
        limits = f"{low:g} to {high:g}" if high < math.inf else f"{low:g} or more"
        raise ValueError(f"{name} is {value}, expected {'finite' if low < -1 else limits}")
