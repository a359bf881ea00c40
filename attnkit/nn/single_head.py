"""out = softmax(q k^T / sqrt(d_k)) v,  q = x W_q^T,  k = c W_k^T,  v = c W_v^T: one head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attnkit.functional import attention
from attnkit.masks import Mask


class SingleHeadAttention(nn.Module):
    """Scaled dot-product attention with three bias-free projections and nothing behind it.

    Args:
        d_model: width of the input.
        d_k: width of queries and keys; None is d_model.
        d_v: width of values and of the output; None is d_k.
        dropout: probability with which a weight is dropped in training.
        device, dtype: of the parameters.

    Raises:
        ValueError: a width below 1, or dropout outside 0 to 1.
    """

    def __init__(
        self,
        d_model: int,
        d_k: int | None = None,
        d_v: int | None = None,
        dropout: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        d_k = d_model if d_k is None else d_k
        d_v = d_k if d_v is None else d_v
        for name, size in (("d_model", d_model), ("d_k", d_k), ("d_v", d_v)):
            if size < 1:
                raise ValueError(f"{name} is {size}, expected 1 or more")
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout is {dropout}, expected 0 to 1")
        self.dropout = dropout
        self.query = nn.Linear(d_model, d_k, bias=False, device=device, dtype=dtype)
        self.key = nn.Linear(d_model, d_k, bias=False, device=device, dtype=dtype)
        self.value = nn.Linear(d_model, d_v, bias=False, device=device, dtype=dtype)

    def forward(
        self, x: Tensor, context: Tensor | None = None, mask: Mask | Tensor | None = None
    ) -> Tensor:
        """Attend from x [B, L, d_model] to ``context`` [B, S, d_model], or to x itself.

        Args:
            x: what asks.
            context: what is asked; None is x.
            mask: as ``attnkit.attention`` takes it: a Mask of ``attnkit.masks``, or a tensor that
                broadcasts to [B, 1, L, S]; bool, True = attend, or float, added to the scores.

        Returns:
            [B, L, d_v]; 0 where a query sees no key.

        Raises:
            ValueError: x or context of another rank or width.
        """
        context = x if context is None else context
        width = self.query.in_features
        for name, t in (("x", x), ("context", context)):
            if t.dim() != 3 or t.shape[-1] != width:
                raise ValueError(f"{name} has shape {tuple(t.shape)}, expected [B, L, {width}]")
        q, k, v = (
            t[:, None] for t in (self.query(x), self.key(context), self.value(context))
        )  # [B, 1, L, d]
        dropout_p = self.dropout if self.training else 0.0
        return attention(q, k, v, mask=mask, dropout_p=dropout_p)[:, 0]
