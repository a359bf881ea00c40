"""Scores less slope_h * |i - j|,  slope_h = 2^(-8 h / H) for heads h = 1 to H.

Press, Smith, Lewis: Train Short, Test Long (2022).
"""

from __future__ import annotations

import torch
from torch import Tensor


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """The slopes float32 [num_heads], to be given to ``attention(..., alibi=slopes)``.

    Where num_heads is no power of two, the paper's code takes the slopes of the power below it, and
    for the heads that are left every other slope of twice that power.

    Raises:
        ValueError: num_heads is below 1.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads is {num_heads}, expected 1 or more")
    power = 1 << (num_heads.bit_length() - 1)
    first = torch.arange(1, power + 1, device=device) * (-8.0 / power)
    others = (2 * torch.arange(num_heads - power, device=device) + 1) * (-4.0 / power)
    return torch.exp2(torch.cat((first, others)))
