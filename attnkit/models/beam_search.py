"""The hypotheses of highest score that a beam of prefixes finds, every row's beam at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnkit.models.generation_options import GenerationOptions, GenerationOutput, Session
from attnkit.models.rows import Rows


def beam_search(
    session: Session, prompt: Tensor, options: GenerationOptions, every: int
) -> GenerationOutput:
    """Keep ``num_beams`` prefixes per row by their sums of log-probabilities, until all are done.

    A hypothesis ends as a row of :func:`generate` does, or at ``max_length``, and competes by its
    score.  A row is done, and frozen, when no prefix can beat the last of the hypotheses to be
    returned any more; with ``early_stopping`` also when ``num_beams`` have ended.  Whether all are
    done is asked every so many steps.
    """
    batch, width, alpha = prompt.shape[0], options.num_beams, options.length_penalty
    logits = session.extend(prompt)
    rows = Rows(prompt, logits, options)
    vocab, device = logits.shape[1], logits.device
    found = _Found(batch, options.num_return_sequences or 1, rows)
    live = rows.log_probs.new_zeros(batch, 1)  # sums of the prefixes, [B, K]; at first there is one
    ended = torch.zeros(batch, dtype=torch.int64, device=device)
    done = torch.zeros(batch, dtype=torch.bool, device=device)
    for length in range(1, options.max_length + 1):
        log_p = rows.log_probabilities(logits)  # [B * K, V]
        sums = (live[..., None] + log_p.unflatten(0, (batch, -1))).flatten(1)  # [B, K * V]
        # a prefix ends in `ways` at most, so that of these candidates K are left to go on
        sums, index = sums.topk(min(width * (1 + rows.ways), sums.shape[1]))
        beam, token = index // vocab, index % vocab  # [B, C]
        first = torch.arange(batch, device=device)[:, None] * live.shape[1]  # [B, 1]
        parent = first + beam
        ends = rows.ends(token, rows.would_end()[parent])
        log_prob = log_p[parent, token]

        counts = ends if length < options.max_length else torch.ones_like(ends)
        scores = (sums / length**alpha).masked_fill(~counts | done[:, None], -math.inf)
        found.add(rows, scores, parent, token, log_prob)

        live, place = sums.masked_fill(ends, -math.inf).topk(min(width, sums.shape[1]))  # [B, K]
        # sums only fall, so a prefix ends at best with its sum, over the kindest length to come
        kindest = max((length + 1) ** alpha, options.max_length**alpha)
        done |= live[:, 0] / kindest <= found.scores[:, -1]
        if options.early_stopping:
            # only those that would have stayed in the beam count
            ended += (ends & sums.isfinite())[:, :width].sum(dim=1)
            done |= ended >= width
        if length == options.max_length or (length % every == 0 and bool(done.all())):
            break

        parent, token = parent.gather(1, place).flatten(), token.gather(1, place).flatten()
        rows.reorder(parent)
        rows.append(token, log_prob.gather(1, place).flatten())
        session.reorder(parent)
        logits = session.extend(token[:, None])
    return found.output(options)


class _Found:
    """The best hypotheses [B, N] that have ended, by score, which is -inf while there is none."""

    def __init__(self, batch: int, n: int, rows: Rows) -> None:
        size = (batch, n, rows.tokens.shape[1])
        self.tokens, self.log_probs = rows.tokens.new_zeros(size), rows.log_probs.new_zeros(size)
        self.scores = rows.log_probs.new_full((batch, n), -math.inf)
        self.lengths = rows.tokens.new_zeros(batch, n)

    def add(
        self, rows: Rows, scores: Tensor, parent: Tensor, token: Tensor, log_prob: Tensor
    ) -> None:
        """Let candidates [B, C] compete: row ``parent`` and one more token, -inf if not ended."""
        n = self.scores.shape[1]
        first = torch.arange(scores.shape[0], device=scores.device)[:, None]  # [B, 1]
        # only the best n of them can get in; old ones stand first
        scores, place = scores.topk(min(n, scores.shape[1]))
        parent, token, log_prob = (x.gather(1, place) for x in (parent, token, log_prob))
        new_tokens, new_log_probs = rows.tokens[parent], rows.log_probs[parent]  # [B, n, L]
        new_tokens[:, :, rows.count], new_log_probs[:, :, rows.count] = token, log_prob
        self.scores, place = torch.cat([self.scores, scores], dim=1).topk(n)
        self.tokens = torch.cat([self.tokens, new_tokens], dim=1)[first, place]
        self.log_probs = torch.cat([self.log_probs, new_log_probs], dim=1)[first, place]
        lengths = torch.full_like(token, rows.count + 1)
        self.lengths = torch.cat([self.lengths, lengths], dim=1)[first, place]

    def output(self, options: GenerationOptions) -> GenerationOutput:
        """Them all, padded, as long as the longest."""
        lengths = self.lengths.masked_fill(self.scores == -math.inf, 0)
        longest = int(lengths.max())
        behind = torch.arange(longest, device=lengths.device) >= lengths[..., None]
        tokens = self.tokens[..., :longest].masked_fill(behind, options.fill_id)
        log_probs = self.log_probs[..., :longest].masked_fill(behind, 0.0)
        output = GenerationOutput(tokens, self.scores, lengths, log_probs)
        if options.num_return_sequences is None:
            return GenerationOutput(*(field[:, 0] for field in output))
        return output
