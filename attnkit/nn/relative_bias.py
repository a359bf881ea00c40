"""Scores plus table[bucket(j - i), h]: near distances have a bucket each, far ones share them.

Raffel et al.: Exploring the Limits of Transfer Learning (T5, 2020).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RelativePositionBias(nn.Module):
    """T5's learned bias of the scores, one number per head and bucket of distances.

    Half of the buckets (of one direction) hold one distance each; the others grow geometrically up
    to ``max_distance``, and all that is farther shares the last one.

    Args:
        num_heads: query heads.
        num_buckets: rows of the table, a multiple of 4, or of 2 if not ``bidirectional``.
        max_distance: the distance from which on there is one bucket.
        bidirectional: keys after the query have half of the buckets; otherwise they share the
            bucket of distance 0 (and a causal mask hides them).
        std: standard deviation of the initial values.
        device, dtype: of the table.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        least = 4 if bidirectional else 2
        if num_heads < 1:
            raise ValueError(f"num_heads is {num_heads}, expected 1 or more")
        if num_buckets < least or num_buckets % least:
            raise ValueError(f"num_buckets is {num_buckets}, expected a multiple of {least}")
        near = num_buckets // least
        if max_distance <= near:
            raise ValueError(f"max_distance is {max_distance}, expected more than {near}")
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.bidirectional, self.std = bidirectional, std
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table anew."""
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """The bias [B, H, Lq, Lk] (B is 1 for positions without rows), for ``attention(bias=...)``.

        Args:
            query_positions: integers [Lq], or [B, Lq] with the positions of each row.
            key_positions: integers [Lk] or [B, Lk].
        """
        distance = key_positions[..., None, :] - query_positions[..., :, None]  # [(B,) Lq, Lk]
        bias = F.embedding(self.bucket(distance), self.weight)  # [(B,) Lq, Lk, H]
        bias = bias.movedim(-1, -3)
        return bias if bias.dim() == 4 else bias[None]

    def bucket(self, distance: Tensor) -> Tensor:
        """The row of the table for each distance j - i, int64 of the same shape."""
        buckets = self.num_buckets
        later = torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            later = (distance > 0) * buckets
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        near = buckets // 2
        # in float64, so that the distances at which a bucket begins do not fall short of it
        growth = torch.log(distance.clamp(min=1).double() / near) / math.log(
            self.max_distance / near
        )
        far = near + (growth * (buckets - near)).long()
        return later + torch.where(distance < near, distance, far.clamp(max=buckets - 1))

    def extra_repr(self) -> str:
        """The arguments of the constructor."""
        return (
            f"{self.weight.shape[1]}, num_buckets={self.num_buckets}, "
            f"max_distance={self.max_distance}, bidirectional={self.bidirectional}"
        )
