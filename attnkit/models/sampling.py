"""token = the first whose cumulated probability exceeds u,  u = Philox(seed of the row, step).

Functions of log-probabilities [R, V]: a row's result depends on that row alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attnkit.backends.reference import philox

_KEY = 0x73616D706C65  # "sample"; dropout has its seeds there


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits [R, V], those of tokens ``seen`` (bool [R, V]) made smaller, whatever their sign.

    Keskar et al.: CTRL (2019), with the multiplication for negative logits that it lacks.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filtered(
    log_p: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """log_p [R, V] in float64, not normalised, -inf for each token that is not to be drawn.

    ===== ============================================================
    top_k token x stays if #{y: p(y) > p(x)} < k
    top_p token x stays if sum {p(y): p(y) > p(x)} < top_p
    min_p token x stays if p(x) >= min_p max p
    ===== ============================================================

    Each is a threshold, so that equals stay or go together, and p is what the one before left,
    normalised.  Top-p: Holtzman et al. (2020); min-p: Nguyen et al. (2024).
    """
    # the largest becomes 0 before the division, which then cannot overflow but to -inf
    x = (log_p - log_p.amax(dim=-1, keepdim=True)).double() / temperature
    ranked = None
    if top_k is not None and top_k < x.shape[-1]:
        ranked = x.topk(top_k).values  # [R, k], the largest first
        x = x.masked_fill(x < ranked[:, -1:], -math.inf)
    if top_p is not None and top_p < 1:
        if ranked is None:
            ranked = x.sort(dim=-1, descending=True).values
        mass = (ranked - x.logsumexp(dim=-1, keepdim=True)).exp().cumsum(dim=-1)
        # the likeliest stays; each other if the mass before it leaves room
        stay = 1 + (mass[:, :-1] < top_p).sum(dim=-1, keepdim=True)
        x = x.masked_fill(x < ranked.gather(1, stay - 1), -math.inf)
    if min_p is not None and min_p > 0:
        x = x.masked_fill(x < math.log(min_p), -math.inf)
    return x


def uniforms(seeds: Sequence[int], steps: int) -> Tensor:
    """Numbers in [0, 1), float64 [R, steps], of 53 bits: those of a row depend on its seed alone.

    Philox-4x32-10 with the step and the 64 bits of the seed as its counter.  They are made on the
    CPU, before the first step, so that every device draws the same ones.
    """
    low = 0xFFFFFFFF
    with torch.device("cpu"):
        halves = [torch.tensor([s >> n & low for s in seeds], dtype=torch.int64) for n in (32, 0)]
        upper, lower = (half[:, None, None] for half in halves)
        step, lane = torch.arange(steps)[:, None], torch.arange(2)
        bits = philox(torch.tensor(_KEY), upper, lower, step, lane)
    high, rest = bits.unbind(-1)  # [R, steps] each
    return ((high << 21) + (rest >> 11)).double() * 2.0**-53


def draw(log_p: Tensor, u: Tensor) -> Tensor:
    """Tokens int64 [R] of log_p [R, V], not normalised, with u [R] in [0, 1)."""
    p = (log_p - log_p.amax(dim=-1, keepdim=True)).double().exp()
    mass = p.cumsum(dim=-1)
    # strictly above u * total: no token of probability 0 is ever the first
    token = torch.searchsorted(mass, u[:, None] * mass[:, -1:], right=True)[:, 0]
    return token.clamp(max=log_p.shape[-1] - 1)  # a row of NaN
