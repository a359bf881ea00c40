"""lr(step) = peak * step / warmup up to the peak at step = warmup, then peak * decay(step)."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def peak_rate(d_model: int = 512, warmup: int = 4000) -> float:
    """The highest learning rate of "Attention Is All You Need": (d_model * warmup) ** -0.5."""
    return float((d_model * warmup) ** -0.5)


def inverse_sqrt_factor(step: int, warmup: int) -> float:
    """The share of the peak at ``step``, counted from 1, of :func:`inverse_sqrt`."""
    _check(warmup)
    return min(step / warmup, math.sqrt(warmup / step))


def cosine_factor(step: int, warmup: int, total: int, floor: float = 0.0) -> float:
    """The share of the peak at ``step``, counted from 1, of :func:`cosine`."""
    _check(warmup)
    if total <= warmup:
        raise ValueError(f"total is {total}, expected more than warmup, {warmup}")
    if step <= warmup:
        return step / warmup
    progress = min(1.0, (step - warmup) / (total - warmup))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def inverse_sqrt(optimizer: Optimizer, warmup: int = 4000) -> LambdaLR:
    """Warm up for ``warmup`` steps to the optimizer's rate, then decay with sqrt(warmup / step).

    With the rate ``peak_rate(d_model, warmup)`` this is the schedule of the paper.
    """
    return LambdaLR(optimizer, lambda done: inverse_sqrt_factor(done + 1, warmup))


def cosine(optimizer: Optimizer, warmup: int, total: int, floor: float = 0.0) -> LambdaLR:
    """Warm up for ``warmup`` steps, then half a cosine to ``floor`` times the rate at ``total``."""
    return LambdaLR(optimizer, lambda done: cosine_factor(done + 1, warmup, total, floor))


def _check(warmup: int) -> None:
    if warmup < 1:
        raise ValueError(f"warmup is {warmup}, expected 1 or more")
