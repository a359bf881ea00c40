"""y_t ~ p(y_t | prompt, y_<t) until every row has ended: the likeliest, drawn, or by beams."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnkit.models.beam_search import beam_search
from attnkit.models.generation_options import GenerationOptions, GenerationOutput, Session
from attnkit.models.rows import Rows
from attnkit.models.sampling import draw, filtered, uniforms

__all__ = ["GenerationOptions", "GenerationOutput", "Session", "generate", "stream"]


@torch.no_grad()
def generate(session: Session, prompt: Tensor, options: GenerationOptions) -> GenerationOutput:
    """Feed ``prompt`` to the session, and choice after choice behind it, until each row has ended.

    Each row gives what it gives alone: one that has ended is filled up, its score frozen, while
    others go on.  The prompt is fed once, however many beams there are, and the last token not at
    all, so that a cache needs room for ``prompt.shape[1] + max_length - 1`` tokens.

    Args:
        session: the model's end of it; it cannot be used again.
        prompt: int64 [B, T], T >= 1: a bos for an encoder-decoder, text for a decoder.
        options: see :class:`GenerationOptions`.

    Raises:
        ValueError: a prompt of another dtype or shape, another number of seeds, ids outside of the
            vocabulary, logits of another shape.
    """
    options.check(prompt)
    batch = prompt.shape[0]
    if batch == 0 or options.max_length == 0:
        return GenerationOutput.nothing(batch, options, prompt.device)
    # asking whether a row is alive makes the host wait for an accelerator: ask it rarely there, at
    # the cost of a few last steps that change nothing
    every = 1 if prompt.device.type == "cpu" else 8
    if options.num_beams > 1:
        return beam_search(session, prompt, options, every)
    *_, (rows, lengths) = _steps(session, prompt, options, every)
    longest = int(lengths.max())
    log_probs = rows.log_probs[:, :longest]
    # in order, so that the width of the batch does not change the rounding
    total = log_probs.cumsum(dim=1).gather(1, lengths[:, None] - 1)[:, 0]
    scores = total / lengths.to(total.dtype) ** options.length_penalty
    output = GenerationOutput(rows.tokens[:, :longest], scores, lengths, log_probs)
    if options.num_return_sequences is None:
        return output
    return GenerationOutput(*(field[:, None] for field in output))


def stream(session: Session, prompt: Tensor, options: GenerationOptions) -> Iterator[Tensor]:
    """The tokens of :func:`generate` as they come: int64 [B] each, padding for rows that ended.

    Raises:
        ValueError: as :func:`generate`, at once; and for ``num_beams`` above 1, where no token is
            certain before the end.
    """
    options.check(prompt)
    if options.num_beams > 1:
        raise ValueError(f"num_beams is {options.num_beams}, expected 1: beams do not stream")
    steps = _steps(session, prompt, options, every=1)
    return (rows.tokens[:, rows.count - 1].clone() for rows, _ in steps)


@torch.no_grad()
def _steps(
    session: Session, prompt: Tensor, options: GenerationOptions, every: int
) -> Iterator[tuple[Rows, Tensor]]:
    """The rows and their lengths [B] after each token; every so many it is seen if all ended.

    A row that has not ended has the length ``max_length``.
    """
    batch, device = prompt.shape[0], prompt.device
    if batch == 0:
        return
    if options.samples:
        u = uniforms(_seeds(options, batch), options.max_length).to(device)
    alive = torch.ones(batch, dtype=torch.bool, device=device)
    lengths = torch.full((batch,), options.max_length, dtype=torch.int64, device=device)
    rows, fed = None, prompt
    all_alive, done = True, False  # as far as the host has seen
    for step in range(options.max_length):
        logits = session.extend(fed)
        if rows is None:
            rows = Rows(prompt, logits, options)
        log_p = rows.log_probabilities(logits)
        if options.samples:
            kept = filtered(log_p, options.temperature, options.top_k, options.top_p, options.min_p)
            token = draw(kept, u[:, step])
        else:
            token = log_p.argmax(dim=-1)
        log_prob = log_p.gather(1, token[:, None])[:, 0]
        if not all_alive:
            log_prob = log_prob.masked_fill(~alive, 0.0)
            token = token.masked_fill(~alive, options.fill_id)
        ended = rows.ends(token, rows.would_end()) if rows.ways else None
        rows.append(token, log_prob)
        if ended is not None and (every > 1 or bool(ended.any())):
            lengths = lengths.masked_fill(ended & alive, rows.count)
            alive = alive & ~ended
            all_alive = False
            done = rows.count % every == 0 and not bool(alive.any())
        yield rows, lengths
        if done:
            return
        fed = token[:, None]


def _seeds(options: GenerationOptions, batch: int) -> list[int]:
    if options.seeds is not None:
        return list(options.seeds)
    if options.seed is not None:
        return [options.seed + b for b in range(batch)]
    return [int(seed) for seed in torch.randint(2**63 - 1, (batch,), device="cpu")]
