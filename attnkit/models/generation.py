"""score = (sum of log-probabilities) / length ** alpha, with length = tokens generated, end token included.

Searches over any model: ``next_logits`` maps the tokens so far [R, 1 + t], bos first, to the logits
[R, V] of the next one, and ``reorder`` makes row r of the model's state what row ``rows[r]`` was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class GenerationOutput(NamedTuple):
    """What a search found.

    ======= ======== ======================================================================
    tokens  [B, T]   int64; without bos; eos where the row ended, padding behind it
    scores  [B]      float32 (float64 for a float64 model): log-probabilities' sum / length ** alpha
    lengths [B]      int64: tokens generated, eos included
    ======= ======== ======================================================================
    """

    tokens: Tensor
    scores: Tensor
    lengths: Tensor


def greedy_search(
    next_logits: Callable[[Tensor], Tensor],
    batch: int,
    device: torch.device,
    *,
    max_length: int,
    bos_id: int,
    eos_id: int,
    pad_id: int,
    length_penalty: float,
) -> GenerationOutput:
    """The likeliest token at every step, until the last row has ended or has ``max_length`` tokens."""
    tokens = torch.full((batch, 1 + max_length), pad_id, device=device)
    tokens[:, 0] = bos_id
    total = torch.zeros(batch, device=device)
    lengths = torch.zeros(batch, dtype=torch.int64, device=device)
    alive = torch.ones(batch, dtype=torch.bool, device=device)
    steps = 0
    while steps < max_length and bool(alive.any()):
        log_p = _log_probabilities(next_logits(tokens[:, : 1 + steps]), pad_id)  # [B, V]
        best, token = log_p.max(dim=-1)
        steps += 1
        tokens[:, steps] = torch.where(alive, token, pad_id)
        total = total + torch.where(alive, best, 0.0)
        lengths += alive
        alive &= token != eos_id
    scores = total / lengths.clamp(min=1).to(total.dtype) ** length_penalty
    return GenerationOutput(tokens[:, 1 : 1 + steps], scores, lengths)


def beam_search(
    next_logits: Callable[[Tensor], Tensor],
    reorder: Callable[[Tensor], None],
    batch: int,
    device: torch.device,
    *,
    max_length: int,
    bos_id: int,
    eos_id: int,
    pad_id: int,
    length_penalty: float,
    num_beams: int,
    early_stopping: bool,
) -> GenerationOutput:
    """The best-scored hypothesis that a beam of ``num_beams`` prefixes per row finds.

    Prefixes are kept by their sums of log-probabilities; a hypothesis ends with ``eos_id`` or at
    ``max_length`` and competes by its score.  A row is done, and frozen, when no prefix can beat its
    best hypothesis any more, or with ``early_stopping`` when ``num_beams`` hypotheses have ended.
    """
    tokens = torch.full((batch, num_beams, 1 + max_length), pad_id, device=device)
    tokens[:, :, 0] = bos_id
    live = torch.full((batch, num_beams), -torch.inf, device=device)
    live[:, 0] = 0.0  # all beams begin alike: one of them counts
    first_row = torch.arange(0, batch * num_beams, num_beams, device=device)[:, None]  # [B, 1]
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
        log_p = _log_probabilities(next_logits(prefixes), pad_id)  # [B * K, V]
        steps += 1
        vocab = log_p.shape[-1]
        sums = (live[..., None] + log_p.unflatten(0, (batch, num_beams))).flatten(1)  # [B, K * V]
        # of 2 K candidates at most K end, since each prefix ends in one way only: K are left to go on
        sums, index = sums.topk(2 * num_beams)
        beam, token = index // vocab, index % vocab  # [B, 2 K]
        ends = token == eos_id

        finished = ends if steps < max_length else torch.ones_like(ends)
        scores = (sums / steps**length_penalty).masked_fill(~finished, -torch.inf)
        score, place = scores.max(dim=1, keepdim=True)  # [B, 1]
        found = tokens.gather(1, _rows(beam.gather(1, place), tokens))[:, 0]  # [B, 1 + max_length]
        found[:, steps] = token.gather(1, place)[:, 0]
        better = (score > best.scores[:, None]) & ~done[:, None]  # [B, 1]
        best = GenerationOutput(
            torch.where(better, found, best.tokens),
            torch.where(better, score, best.scores[:, None])[:, 0],
            best.lengths.masked_fill(better[:, 0], steps),
        )

        live, place = sums.masked_fill(ends, -torch.inf).topk(num_beams)  # [B, K]
        beam, goes_on = beam.gather(1, place), token.gather(1, place)
        tokens = tokens.gather(1, _rows(beam, tokens))
        tokens[:, :, steps] = goes_on
        reorder((first_row + beam).flatten())

        if early_stopping:
            # only those that would have stayed in the beam count
            ended += (ends & sums.isfinite())[:, :num_beams].sum(dim=1)
            done |= ended >= num_beams
        else:
            # sums only fall, so a prefix ends at best with its sum, divided by the kindest length
            kindest = max((steps + 1) ** length_penalty, max_length**length_penalty)
            done |= live[:, 0] / kindest <= best.scores
    longest = int(best.lengths.max()) if batch else 0
    return GenerationOutput(best.tokens[:, 1 : 1 + longest], best.scores, best.lengths)


def _log_probabilities(logits: Tensor, pad_id: int) -> Tensor:
    """log softmax in float32 at least; padding cannot be chosen, but keeps its share of the probability."""
    log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    log_p[:, pad_id] = -torch.inf
    return log_p


def _rows(beam: Tensor, tokens: Tensor) -> Tensor:
    """Index that gathers whole rows [B, K', L] of tokens [B, K, L]."""
    return beam[..., None].expand(*beam.shape, tokens.shape[-1])
