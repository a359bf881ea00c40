"""loss = mean over real tokens of -sum_w q(w) log p(w),  q = (1 - eps) one-hot + eps / V."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def label_smoothed_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    smoothing: float = 0.1,
    ignore_index: int = 0,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Cross entropy with label smoothing, averaged over the targets that are not ``ignore_index``.

    Args:
        logits: [..., V], any float dtype; the loss is computed in float32 at least.
        targets: [...] int64.  A row that is ``ignore_index`` adds nothing and gets no gradient.
        smoothing: eps in 0..1, spread evenly over all V classes; 0 is ``F.cross_entropy``.
        ignore_index: the id of padding.
        reduction: "mean", or "sum" where a batch comes in parts: the mean of means is no mean.

    Returns:
        A scalar; 0, with a gradient of zeros, when every target is padding.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}, expected 'mean' or 'sum'")
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets is {tuple(targets.shape)}, expected {tuple(logits.shape[:-1])}: "
            f"logits {tuple(logits.shape)} without the last dimension"
        )
    total = F.cross_entropy(
        logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32)),
        targets.flatten(),
        ignore_index=ignore_index,
        label_smoothing=smoothing,
        reduction="sum",
    )
    if reduction == "sum":
        return total
    return total / (targets != ignore_index).sum().clamp(min=1)
