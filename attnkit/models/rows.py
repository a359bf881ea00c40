"""R rows in the making: what each has said, what it may say next, and what would end it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnkit.models.generation_options import GenerationOptions
from attnkit.models.sampling import penalised


class Rows:
    """The rows of a generation, in step: each has ``count`` tokens, in the columns before it.

    ========= =============== ===========================================================
    tokens    [R, max_length] int64, generated ones
    log_probs [R, max_length] theirs, by :meth:`log_probabilities`
    seen      [R, V] bool     whether a token is in the prompt or generated, None: unasked
    ========= =============== ===========================================================
    """

    def __init__(self, prompt: Tensor, logits: Tensor, options: GenerationOptions) -> None:
        options.check_logits(logits, prompt.shape[0])
        self.options = options
        self.count = 0
        size, device = (prompt.shape[0], options.max_length), logits.device
        self.tokens = torch.full(size, options.fill_id, device=device)
        self.log_probs = torch.zeros(size, dtype=_precise(logits), device=device)
        self.seen: Tensor | None = None
        if options.repetition_penalty != 1:
            self.seen = torch.zeros(logits.shape, dtype=torch.bool, device=device)
            self.seen.scatter_(1, prompt, True)
            if options.pad_id is not None:
                self.seen[:, options.pad_id] = False

        eos, pad = options.eos_ids, () if options.pad_id is None else (options.pad_id,)
        self._withheld = torch.tensor(pad, dtype=torch.int64, device=device)
        self._withheld_at_first = torch.tensor((*pad, *eos), dtype=torch.int64, device=device)
        last = sorted({*eos, *(sequence[-1] for sequence in options.stop)})
        self.ways = len(last)  # in which a row can end: tokens that end it, if they do now
        self._last = torch.tensor(last, dtype=torch.int64, device=device)
        is_eos = [token in eos for token in last]
        self._is_eos = torch.tensor(is_eos, dtype=torch.bool, device=device)
        # stop sequences by their length: all but the last token [S, n - 1], the last [S, 1]
        lengths = sorted({len(sequence) for sequence in options.stop})
        self._stops = [
            torch.tensor([s for s in options.stop if len(s) == n], device=device).split(
                [n - 1, 1], dim=1
            )
            for n in lengths
        ]

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Of the next token, [R, V]; -inf for what is withheld, which keeps its probability."""
        logits = logits.to(_precise(logits))
        if self.seen is not None:
            logits = penalised(logits, self.seen, self.options.repetition_penalty)
        log_p = logits.log_softmax(dim=-1)
        early = self.count + 1 < self.options.min_length
        withheld = self._withheld_at_first if early else self._withheld
        return log_p.index_fill_(1, withheld, -math.inf) if len(withheld) else log_p

    def would_end(self) -> Tensor:
        """Which of the ``ways`` to end are open to each row now: bool [R, ways]."""
        open_ = self._is_eos.expand(self.tokens.shape[0], -1)
        if self.count + 1 < self.options.min_length:
            return torch.zeros_like(open_)
        for body, last in self._stops:
            n = body.shape[1]
            if n <= self.count:
                tail = self.tokens[:, None, self.count - n : self.count]
                said = (tail == body).all(dim=-1)  # [R, S]
                open_ = open_ | (said[..., None] & (last == self._last)).any(dim=1)
        return open_

    def ends(self, token: Tensor, open_: Tensor) -> Tensor:
        """Whether ``token`` [...] ends a row to which the ways ``open_`` [..., ways] are open."""
        return ((token[..., None] == self._last) & open_).any(dim=-1)

    def append(self, token: Tensor, log_prob: Tensor) -> None:
        """Add a token [R] to the rows, and its log-probability."""
        self.tokens[:, self.count] = token
        self.log_probs[:, self.count] = log_prob
        self.count += 1
        if self.seen is not None:
            self.seen.scatter_(1, token[:, None], True)

    def reorder(self, rows: Tensor) -> None:
        """Row r becomes what row ``rows[r]`` was."""
        self.tokens, self.log_probs = self.tokens[rows], self.log_probs[rows]
        if self.seen is not None:
            self.seen = self.seen[rows]


def _precise(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)
