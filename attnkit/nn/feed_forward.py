"""out = f(x W_1^T + b_1) W_2^T + b_2 at every position; for SwiGLU f(a, b) = silu(a) * b."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class FeedForward(nn.Module):
    """Position-wise feed-forward network, ``linear2(dropout(activation(linear1(x))))``.

    Args:
        d_model: width of input and output.
        d_ff: inner width; 4 * d_model unless given.
        activation: ``"relu"``, ``"gelu"``, ``"swiglu"`` (``linear1`` then has 2 * d_ff outputs, the
            gate first) or any function of a tensor.
        dropout: probability of the dropout on the inner activations.
        bias: whether the linear layers have biases.
        device, dtype: of the parameters.

    Raises:
        ValueError: a size below 1, or an unknown activation.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        dropout: float = 0.0,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        d_ff = 4 * d_model if d_ff is None else d_ff
        for name, size in (("d_model", d_model), ("d_ff", d_ff)):
            if size < 1:
                raise ValueError(f"{name} is {size}, expected at least 1")
        super().__init__()
        self.gated = activation == "swiglu"
        if self.gated:
            self.activation: Callable[[Tensor], Tensor] = F.silu
        elif callable(activation):
            self.activation = activation
        elif activation in _ACTIVATIONS:
            self.activation = _ACTIVATIONS[activation]
        else:
            known = ", ".join((*_ACTIVATIONS, "swiglu"))
            raise ValueError(f"activation is {activation!r}, expected a function or one of {known}")
        inner = 2 * d_ff if self.gated else d_ff
        self.linear1 = nn.Linear(d_model, inner, bias=bias, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(d_ff, d_model, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., d_model]`` to ``[..., d_model]``."""
        x = self.linear1(x)
        if self.gated:
            gate, x = x.chunk(2, dim=-1)
            x = self.activation(gate) * x
        else:
            x = self.activation(x)
        return self.linear2(self.dropout(x) if self.training else x)
