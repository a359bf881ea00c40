"""How tensors lie in memory, as far as more than one backend goes by it."""

from __future__ import annotations

from torch import Tensor


def empty_like(q: Tensor, last: int) -> Tensor:
    """An empty [B, H, L, last] in the layout that kernels give their output for queries q."""
    b, h, n = q.shape[:3]
    if h > 1 and n > 1 and q.stride(1) < q.stride(2):
        return q.new_empty((b, n, h, last)).transpose(1, 2)
    return q.new_empty((b, h, n, last))


def readable(*tensors: Tensor) -> bool:
    """Whether the numbers of each row lie side by side."""
    return all(t.stride(-1) == 1 or t.shape[-1] <= 1 for t in tensors)
