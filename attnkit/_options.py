"""From the options of a call to what the backends take: an AttentionSpec and a TensorArgs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit import _checks, masks
from attnkit._autograd import NO_ARGS
from attnkit.masks import Mask, describe
from attnkit.spec import AttentionSpec, TensorArgs


class Options(NamedTuple):
    """args.bias is 4-D, not yet expanded; `dropped`: dropout_p is 1 and no weight is kept."""

    args: TensorArgs
    spec: AttentionSpec  # without dropout where `dropped`, so that lse can still be had
    dropped: bool


def gather(
    q: Tensor,
    lk: int,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    dense: Tensor | None = None,
) -> Options:
    """Check and lower the options of a call with queries q [B, Hq, Lq, D] and lk keys.

    dense: in place of mask and bias, a 4-D mask that has been checked.

    Raises:
        TypeError, ValueError, RuntimeError: as `attnkit.attention` says.
    """
    if scale is None:
        d = q.shape[3]
        scale = d**-0.5 if d else 1.0
    elif type(scale) is not float:
        scale = _checks.number("scale", scale)
    if softcap != 0.0:
        softcap = _checks.cap(softcap)
    drawn = None
    dropped = False
    if dropout_p != 0.0 or seed is not None:
        dropout_p = _checks.probability(dropout_p)
        drawn = _checks.seed_tensor(seed, q)
        dropped = dropout_p == 1.0
        if dropped or dropout_p == 0.0:
            dropout_p, drawn = 0.0, None
    if sinks is not None:
        sinks = _checks.per_head("sinks", sinks, [(q.shape[1],)], q)
        sinks = sinks.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    if alibi is not None:
        alibi = _slopes(alibi, q)
    if bias is None and isinstance(mask, Tensor):
        dense = _checked("mask", mask, q, lk)
    if dense is not None:
        keep, dense = masks.split_keep(dense, q.shape[0], lk)
        args = TensorArgs(_unstretched(dense), sinks, keep, alibi=alibi, seed=drawn)
        return Options(args, AttentionSpec(scale, None, None, False, softcap, dropout_p), dropped)
    if mask is None and bias is None:
        spec = AttentionSpec(scale, None, None, False, softcap, dropout_p)
        if sinks is None and alibi is None and drawn is None:
            return Options(NO_ARGS, spec, dropped)
        return Options(TensorArgs(sinks=sinks, alibi=alibi, seed=drawn), spec, dropped)
    parts = _as_mask(mask, bias, q, lk).resolve(q.shape[0], q.shape[1], q.shape[2], lk, q.device)
    spec = AttentionSpec(scale, parts.left, parts.right, parts.bottom_right, softcap, dropout_p)
    args = TensorArgs(
        bias=_unstretched(parts.dense),
        sinks=sinks,
        keep=parts.keep,
        lengths=parts.lengths,
        q_segments=parts.q_segments,
        k_segments=parts.k_segments,
        blocks=parts.blocks,
        alibi=alibi,
        seed=drawn,
    )
    return Options(args, spec, dropped)


def zeros(shape: tuple[int, ...], q: Tensor, *inputs: Tensor | None) -> Tensor:
    """What is left when dropout_p is 1, in q's dtype, with a gradient of zero for every input.

    The sum of an empty slice has that gradient even where an input holds NaN.
    """
    out = q.new_zeros(shape)
    for t in inputs:
        if t is not None and t.requires_grad:
            out = out + t[..., :0].sum().to(q.dtype)
    return out


def _checked(name: str, tensor: Tensor, q: Tensor, lk: int) -> Tensor:
    """A mask or bias as [B or 1, Hq or 1, Lq or 1, Lk or 1], in a dtype that the kernels take."""
    tensor = _checks.addend(name, tensor, q)
    _checks.check_broadcast(name, tensor, (*q.shape[:3], lk))
    return tensor if tensor.dim() == 4 else tensor[(None,) * (4 - tensor.dim())]


def _as_mask(mask: Mask | Tensor | None, bias: Tensor | None, q: Tensor, lk: int) -> Mask:
    """Mask and bias together as one mask, the float part in a dtype that can be added to scores."""
    if mask is None:
        found = Mask()
    elif isinstance(mask, Mask):
        found = mask
        if mask.dense is not None:
            found = mask.with_dense(_checks.addend("mask", mask.dense, q))
    elif isinstance(mask, Tensor):
        found = Mask(dense=_checked("mask", mask, q, lk))
    else:
        raise TypeError(f"mask is {describe(mask)}, expected a Mask of attnkit.masks or a Tensor")
    if bias is not None:
        if isinstance(bias, Tensor) and bias.dtype == torch.bool:
            raise TypeError("bias is a bool tensor, expected a float one: pass it as mask")
        found = found & Mask(dense=_checked("bias", bias, q, lk))
    return found


def _unstretched(bias: Tensor | None) -> Tensor | None:
    """A copy where a bias that wants a gradient was stretched by its owner.

    Backends give the gradient of a stretched dimension (stride 0) as one sum; the owner's tensor
    has an entry for each place.
    """
    if (
        bias is not None
        and bias.requires_grad
        and torch.is_grad_enabled()
        and any(n != 1 and s == 0 for n, s in zip(bias.shape, bias.stride(), strict=True))
    ):
        return bias.contiguous()
    return bias


def _slopes(alibi: Any, q: Tensor) -> Tensor:
    batch, heads = q.shape[:2]
    alibi = _checks.per_head("alibi", alibi, [(heads,), (batch, heads), (1, heads)], q)
    if alibi.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "alibi requires a gradient, expected slopes without one: pass alibi.detach(), or a "
            "learned bias"
        )
    return (alibi if alibi.dim() == 2 else alibi[None]).float().contiguous()
