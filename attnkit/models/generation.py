"""score = (sum of log-probabilities) / length ** alpha,  length = tokens generated, eos included.

Searches over any model: ``next_logits`` maps the tokens so far [R, 1 + t], bos first, to the logits
[R, V] of the next one, and ``reorder`` makes row r of the model's state what row ``rows[r]`` was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class SearchOptions:
    """What ends and ranks the hypotheses of a search; see :meth:`Seq2SeqTransformer.generate`."""

    max_length: int
    bos_id: int
    eos_id: int
    pad_id: int
    length_penalty: float = 1.0
    num_beams: int = 1
    early_stopping: bool = False


class GenerationOutput(NamedTuple):
    """What a search found.

    ======= ====== =================================================================
    tokens  [B, T] int64; without bos; eos where the row ended, padding behind it
    scores  [B]    float32 (float64 for a float64 model)
    lengths [B]    int64: tokens generated, eos included
    ======= ====== =================================================================
    """

    tokens: Tensor
    scores: Tensor
    lengths: Tensor


def greedy_search(
    next_logits: Callable[[Tensor], Tensor],
    batch: int,
    device: torch.device,
    options: SearchOptions,
) -> GenerationOutput:
    """The likeliest token at every step, until each row has ended or has ``max_length`` tokens."""
    tokens = torch.full((batch, 1 + options.max_length), options.pad_id, device=device)
    tokens[:, 0] = options.bos_id
    total = torch.zeros(batch, device=device)
    lengths = torch.zeros(batch, dtype=torch.int64, device=device)
    alive = torch.ones(batch, dtype=torch.bool, device=device)
    steps = 0
    while steps < options.max_length and bool(alive.any()):
        log_p = _log_probabilities(next_logits(tokens[:, : 1 + steps]), options.pad_id)  # [B, V]
        best, token = log_p.max(dim=-1)
        steps += 1
        tokens[:, steps] = torch.where(alive, token, options.pad_id)
        total = total + torch.where(alive, best, 0.0)
        lengths += alive
        alive &= token != options.eos_id
    scores = total / lengths.clamp(min=1).to(total.dtype) ** options.length_penalty
    return GenerationOutput(tokens[:, 1 : 1 + steps], scores, lengths)


def beam_search(
    next_logits: Callable[[Tensor], Tensor],
    reorder: Callable[[Tensor], None],
    batch: int,
    device: torch.device,
    options: SearchOptions,
) -> GenerationOutput:
    """The best-scored hypothesis that a beam of ``num_beams`` prefixes per row finds.

    Prefixes are kept by their sums of log-probabilities; a hypothesis ends with ``eos_id`` or at
    ``max_length`` and competes by its score.  A row is done, and frozen, when no prefix can beat
    its best hypothesis any more; with ``early_stopping`` also when ``num_beams`` have ended.
    """
    width, max_length, alpha = options.num_beams, options.max_length, options.length_penalty
    tokens = torch.full((batch, width, 1 + max_length), options.pad_id, device=device)
    tokens[:, :, 0] = options.bos_id
    live = torch.full((batch, width), -torch.inf, device=device)
    live[:, 0] = 0.0  # all beams begin alike: one of them counts
    first_row = torch.arange(0, batch * width, width, device=device)[:, None]  # [B, 1]
    best = GenerationOutput(
        tokens[:, 0].clone(),
        torch.full((batch,), -torch.inf if max_length else 0.0, device=device),
        torch.zeros(batch, dtype=torch.int64, device=device),
    )
    ended = torch.zeros(batch, dtype=torch.int64, device=device)
    done = torch.zeros(batch, dtype=torch.bool, device=device)
    steps = 0
    while steps < max_length and not bool(done.all()):
        prefixes = tokens[:, :, : 1 + steps].flatten(0, 1)
        log_p = _log_probabilities(next_logits(prefixes), options.pad_id)  # [B * K, V]
        steps += 1
        vocab = log_p.shape[-1]
        sums = (live[..., None] + log_p.unflatten(0, (batch, width))).flatten(1)  # [B, K * V]
        # at most K of 2 K candidates end, since a prefix ends in one way only: K are left to go on
        sums, index = sums.topk(2 * width)
        beam, token = index // vocab, index % vocab  # [B, 2 K]
        ends = token == options.eos_id

        finished = ends if steps < max_length else torch.ones_like(ends)
        scores = (sums / steps**alpha).masked_fill(~finished, -torch.inf)
        score, place = scores.max(dim=1, keepdim=True)  # [B, 1]
        found = tokens.gather(1, _rows(beam.gather(1, place), tokens))[:, 0]  # [B, 1 + max_length]
        found[:, steps] = token.gather(1, place)[:, 0]
        better = (score > best.scores[:, None]) & ~done[:, None]  # [B, 1]
        best = GenerationOutput(
            torch.where(better, found, best.tokens),
            torch.where(better, score, best.scores[:, None])[:, 0],
            best.lengths.masked_fill(better[:, 0], steps),
        )

        live, place = sums.masked_fill(ends, -torch.inf).topk(width)  # [B, K]
        beam, goes_on = beam.gather(1, place), token.gather(1, place)
        tokens = tokens.gather(1, _rows(beam, tokens))
        tokens[:, :, steps] = goes_on
        reorder((first_row + beam).flatten())

        # sums only fall, so a prefix ends at best with its sum, over the kindest length to come
        kindest = max((steps + 1) ** alpha, max_length**alpha)
        done |= live[:, 0] / kindest <= best.scores
        if options.early_stopping:
            # only those that would have stayed in the beam count
            ended += (ends & sums.isfinite())[:, :width].sum(dim=1)
            done |= ended >= width
    longest = int(best.lengths.max()) if batch else 0
    return GenerationOutput(best.tokens[:, 1 : 1 + longest], best.scores, best.lengths)


def _log_probabilities(logits: Tensor, pad_id: int) -> Tensor:
    """Log softmax in float32 at least; padding is never chosen but keeps its probability."""
    log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    log_p[:, pad_id] = -torch.inf
    return log_p


def _rows(beam: Tensor, tokens: Tensor) -> Tensor:
    """Index that gathers whole rows [B, K', L] of tokens [B, K, L]."""
    return beam[..., None].expand(*beam.shape, tokens.shape[-1])
