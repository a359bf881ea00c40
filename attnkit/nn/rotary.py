"""(a, b) <- (a cos p w - b sin p w, a sin p w + b cos p w) at position p,  w = theta^(-2 i / d).

Su et al.: RoFormer (2021).  The product of a rotated query and a rotated key depends on the
distance of their positions alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Rotates pairs of a head's dimensions by angles that grow with the position.

    It has neither parameters nor buffers: angles are computed in float64 and rounded once.

    Args:
        dim: width of a head.
        rotary_dim: leading dimensions that are rotated, an even number; None: all.  The others
            stay as they are.
        theta: base of the frequencies.
        interleaved: pairs are dimensions (2 i, 2 i + 1), as in the paper, instead of
            (i, i + rotary_dim / 2), as in most implementations.
        scaling: None; "linear", which divides positions by ``factor`` (Chen et al. 2023); or "ntk",
            which replaces theta by theta * factor^(d / (d - 2)), so that the highest frequency
            stays and the lowest is divided by ``factor``.
        factor: by how much the context grows, 1 or more.

    Raises:
        ValueError: a number out of range, or an unknown scaling.
    """

    def __init__(
        self,
        dim: int,
        rotary_dim: int | None = None,
        *,
        theta: float = 10000.0,
        interleaved: bool = False,
        scaling: str | None = None,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        rotary_dim = dim if rotary_dim is None else rotary_dim
        if rotary_dim % 2 or not 0 < rotary_dim <= dim:
            raise ValueError(
                f"rotary_dim is {rotary_dim}, expected an even number, 2 to dim = {dim}"
            )
        if scaling not in (None, "linear", "ntk"):
            raise ValueError(f"scaling is {scaling!r}, expected None, 'linear' or 'ntk'")
        if factor < 1.0 or (scaling is None and factor != 1.0):
            raise ValueError(f"factor is {factor}, expected 1 or more, and 1 without scaling")
        if scaling == "ntk":
            if rotary_dim < 4:
                raise ValueError(f"rotary_dim is {rotary_dim}, expected 4 or more for 'ntk'")
            theta *= factor ** (rotary_dim / (rotary_dim - 2))
        self.dim, self.rotary_dim, self.theta = dim, rotary_dim, theta
        self.interleaved = interleaved
        self.stretch = factor if scaling == "linear" else 1.0

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """x [B, H, L, dim] rotated, in its dtype; computed in float32 (float64) at least.

        Args:
            x: queries or keys.
            positions: integers [L], or [B, L] with the positions of each row; None counts from 0.

        Raises:
            ValueError: x or positions of another shape.
        """
        if x.dim() != 4 or x.shape[-1] != self.dim:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected [B, H, L, {self.dim}]")
        if positions is None:
            positions = torch.arange(x.shape[2], device=x.device)
        batch, length = x.shape[0], x.shape[2]
        if tuple(positions.shape) not in ((length,), (1, length), (batch, length)):
            raise ValueError(
                f"positions has shape {tuple(positions.shape)}, expected [{length}] or "
                f"[{batch}, {length}]"
            )
        cos, sin = self.tables(positions, x.dtype)
        return self.rotate(x, cos[..., None, :, :], sin[..., None, :, :])

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [..., L, rotary_dim / 2] for positions [..., L] and inputs of ``dtype``."""
        even = torch.arange(0, self.rotary_dim, 2, device=positions.device, dtype=torch.float64)
        frequencies = self.theta ** (-even / self.rotary_dim) / self.stretch
        angles = positions[..., None] * frequencies
        dtype = torch.promote_types(dtype, torch.float32)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [..., dim] rotated by tables that broadcast to [..., rotary_dim / 2]."""
        if self.rotary_dim < self.dim:
            turned, rest = x.split((self.rotary_dim, self.dim - self.rotary_dim), dim=-1)
            return torch.cat((self._rotate(turned, cos, sin), rest), dim=-1)
        return self._rotate(x, cos, sin)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide = x.to(cos.dtype)
        if self.interleaved:
            a, b = wide.unflatten(-1, (-1, 2)).unbind(-1)
        else:
            a, b = wide.chunk(2, dim=-1)
        pair = (torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin))
        turned = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return turned.to(x.dtype)

    def extra_repr(self) -> str:
        """What was chosen."""
        return (
            f"{self.dim}, rotary_dim={self.rotary_dim}, theta={self.theta:g}, "
            f"interleaved={self.interleaved}, stretch={self.stretch:g}"
        )
