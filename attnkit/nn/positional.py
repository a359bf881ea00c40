"""x + PE, learned or PE[p, 2i] = sin(p w_i), PE[p, 2i + 1] = cos(p w_i), w_i = 10000^(-2i / d)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _PositionalEncoding(nn.Module):
    """What both encodings share: ``weight`` ``[max_len, d_model]``, added row by row."""

    weight: Tensor

    def __init__(self, d_model: int, max_len: int, dropout: float, batch_first: bool) -> None:
        for name, size in (("d_model", d_model), ("max_len", max_len)):
            if size < 1:
                raise ValueError(f"{name} is {size}, expected at least 1")
        super().__init__()
        self.d_model = d_model
        self.max_len = max_len
        self.batch_first = batch_first
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """``dropout(x + encoding)``.

        Args:
            x: ``[B, L, d_model]``, ``[L, B, d_model]`` without ``batch_first``, or unbatched
                ``[L, d_model]``.
            positions: integers, the position of each token, for left padding and for decoding with
                a cache: ``[B, L]`` (or ``[1, L]``, ``[B, 1]``) whatever the layout of ``x``, or
                ``[L]``, the same for all sequences.  None counts from 0.

        Returns:
            A tensor of the shape and dtype of ``x``.

        Raises:
            ValueError: ``x`` of another width or rank, or longer than ``max_len``; ``positions`` of
                a shape that does not fit it.
            TypeError: ``positions`` that are not integers.
            IndexError: a position outside 0 to ``max_len - 1`` (on a GPU, a device-side assertion).
        """
        if x.dim() not in (2, 3) or x.shape[-1] != self.d_model:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, expected 2 or 3 dimensions, the last {self.d_model}"
            )
        length = x.shape[1 if x.dim() == 3 and self.batch_first else 0]
        if positions is None:
            if length > self.max_len:
                raise ValueError(
                    f"x has length {length}, expected at most max_len = {self.max_len}; "
                    "make the module with a larger max_len"
                )
            rows = self.weight[:length]  # [L, d_model]
        else:
            batch = None if x.dim() == 2 else x.shape[0 if self.batch_first else 1]
            self._check_positions(positions, length, batch)
            rows = self._look_up(positions)  # [L, d_model] or [B, L, d_model]
        if rows.dim() == 2:
            if x.dim() == 3 and not self.batch_first:
                rows = rows.unsqueeze(1)
        elif not self.batch_first:
            rows = rows.transpose(0, 1)
        return self.dropout(x + rows.to(x.dtype))

    def _check_positions(self, positions: Tensor, length: int, batch: int | None) -> None:
        if positions.is_floating_point() or positions.dtype == torch.bool:
            raise TypeError(f"positions has dtype {positions.dtype}, expected an integer type")
        shape = tuple(positions.shape)
        fits = shape == (length,) or (
            batch is not None
            and len(shape) == 2
            and shape[0] in (1, batch)
            and shape[1] in (1, length)
        )
        if not fits:
            whole = "" if batch is None else f" or [{batch}, {length}]"
            raise ValueError(f"positions has shape {list(shape)}, expected [{length}]{whole}")

    def _look_up(self, positions: Tensor) -> Tensor:
        try:
            return F.embedding(positions.long(), self.weight)
        except IndexError as error:
            raise IndexError(
                f"positions go from {int(positions.min())} to {int(positions.max())}, "
                f"expected 0 to max_len - 1 = {self.max_len - 1}"
            ) from error

    def extra_repr(self) -> str:
        """The arguments of the constructor."""
        return f"{self.d_model}, max_len={self.max_len}, batch_first={self.batch_first}"


class SinusoidalPositionalEncoding(_PositionalEncoding):
    """The fixed sines and cosines of "Attention Is All You Need", for odd ``d_model``, too.

    The table is computed in float64 and not part of the state_dict.

    Args:
        d_model: width, at least 1.
        max_len: number of positions; a longer input is a ValueError.
        dropout: probability of the dropout on the sum.
        batch_first: whether ``x`` is ``[B, L, d_model]`` (the default) or ``[L, B, d_model]``.
        device, dtype: of the table.
    """

    def __init__(
        self,
        d_model: int,
        max_len: int = 5000,
        dropout: float = 0.0,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, max_len, dropout, batch_first)
        table = torch.empty(max_len, d_model, device=device, dtype=dtype)
        self.register_buffer("weight", table, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the table anew, as after ``to_empty``."""
        device = self.weight.device
        position = torch.arange(self.max_len, device=device, dtype=torch.float64)
        even = torch.arange(0, self.d_model, 2, device=device, dtype=torch.float64)
        angle = torch.outer(position, 10000.0 ** (-even / self.d_model))  # [max_len, ceil(d / 2)]
        self.weight[:, 0::2] = angle.sin()
        self.weight[:, 1::2] = angle[:, : self.d_model // 2].cos()


class LearnedPositionalEncoding(_PositionalEncoding):
    """One learned vector for each of ``max_len`` positions, from a normal distribution at first.

    Args:
        d_model: width, at least 1.
        max_len: number of positions; a longer input is a ValueError.
        dropout: probability of the dropout on the sum.
        batch_first: whether ``x`` is ``[B, L, d_model]`` (the default) or ``[L, B, d_model]``.
        std: standard deviation of the initial values.
        device, dtype: of the parameter.
    """

    def __init__(
        self,
        d_model: int,
        max_len: int = 1024,
        dropout: float = 0.0,
        batch_first: bool = True,
        std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, max_len, dropout, batch_first)
        self.std = std
        self.weight = nn.Parameter(torch.empty(max_len, d_model, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors anew."""
        nn.init.normal_(self.weight, std=self.std)
