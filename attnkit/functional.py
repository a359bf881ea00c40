"""Public functions.  They check the arguments once, choose a backend, and record the gradient.

    out = dropout(softmax(scale * query key^T + bias, over visible keys)) value
    lse = log sum exp of each row

The way of a call: the door here, `_autograd.run`, `dispatch.select`, one backend.
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import handle_torch_function, has_torch_function

from attnkit import _checks, _shapes, masks
from attnkit._autograd import run
from attnkit._options import NO_ARGS, finish, gather
from attnkit.masks import Mask
from attnkit.spec import AttentionSpec


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale * query key^T + attn_mask) value, as torch.nn.functional's function of that name.

    Args:
        query: [..., Hq, L, E], or [L, E]; float32, bfloat16, float16 or float64.
        key: [..., H, S, E]; leading dimensions broadcast against the query's.
        value: [..., H, S, Ev].
        attn_mask: broadcasts to the scores [..., Hq, L, S].  Bool: True = attend (the reverse of
            torch.nn.MultiheadAttention's masks).  Float, of the query's dtype or float32: added to
            the scores, with a gradient where it requires one.
        dropout_p: probability with which a weight is dropped, whether or not a module is training.
        is_causal: query i sees keys j <= i (aligned top-left); not together with attn_mask.
        scale: 1 / sqrt(E) if None.
        enable_gqa: key and value may have fewer heads (dimension -3), which divide the query's.

    Returns:
        [..., Hq, L, Ev] in the query's dtype (the autocast dtype under torch.autocast) and, for a
        4-d query, in the query's memory layout.  A query that sees no key gets 0, and gradient 0.

    Raises:
        TypeError: an argument of the wrong kind.
        RuntimeError: shapes, dtypes or devices that do not fit; attn_mask with is_causal; dropout_p
            outside [0, 1]; q, k, v sharded by torch's context_parallel.
        NotImplementedError: complex or nested tensors; a forced backend that cannot serve the call.
    """
    if (
        attn_mask is None
        and dropout_p == 0.0
        and (scale is None or type(scale) is float)
        and (is_causal is False or is_causal is True)
        and _checks.plain(query, key, value)
    ):
        shape = query.shape
        if len(shape) == 4 and shape == key.shape == value.shape:
            if scale is None:
                scale = shape[3] ** -0.5 if shape[3] else 1.0
            spec = AttentionSpec(scale, None, 0 if is_causal else None)
            return run(query, key, value, NO_ARGS, spec)[0]
    tensors = (query, key, value, attn_mask)
    if isinstance(attn_mask, CausalBias):
        return _causal_bias(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if has_torch_function(tensors):
        result: Tensor = handle_torch_function(
            scaled_dot_product_attention,
            tensors,
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return result
    mask = masks.causal() if _checks.flag("is_causal", is_causal) else None
    if attn_mask is not None and mask is not None:
        raise RuntimeError(
            "attn_mask was given together with is_causal=True, expected one of them: Explicit "
            "attn_mask should not be set when is_causal=True"
        )
    return _sdpa(query, key, value, attn_mask, mask, dropout_p, scale, enable_gqa)


def _causal_bias(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: CausalBias,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The band that a CausalBias stands for; its storage is uninitialised and never looked at."""
    if is_causal:
        raise ValueError("CausalBias should not be used with causal=True (argument is_causal)")
    found, wanted = (bias.seq_len_q, bias.seq_len_kv), (query.shape[-2], key.shape[-2])
    if found != wanted:
        raise RuntimeError(f"attn_mask is a CausalBias for lengths {found}, expected {wanted}")
    mask = masks.causal(bottom_right=bias.variant == CausalVariant.LOWER_RIGHT)
    return _sdpa(query, key, value, None, mask, dropout_p, scale, enable_gqa)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    mask: Mask | None,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    query, key, value = _checks.settle(query, key, value)
    gqa = _checks.flag("enable_gqa", enable_gqa)
    q, k, v, scores = _shapes.to_4d(query, key, value, gqa)
    if attn_mask is not None:
        attn_mask = _checks.addend("attn_mask", attn_mask, q)
        mask = masks.from_dense(_shapes.mask_to_4d(attn_mask, scores))
    args, spec, dropped = gather(q, k.shape[2], mask, scale=scale, dropout_p=dropout_p)
    out = finish(run(q, k, v, args, spec)[0], dropped)
    return out if len(scores) == 4 else out.reshape(*scores[:-1], v.shape[3])


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = ...,
    bias: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    alibi: Tensor | None = ...,
    dropout_p: float = ...,
    seed: int | Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = ...,
    bias: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    alibi: Tensor | None = ...,
    dropout_p: float = ...,
    seed: int | Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The full call: s = softcap(scale * q k^T) - alibi * distance + bias, softmax over visible keys.

    Args:
        query: [B, Hq, Lq, D]; float32, bfloat16, float16 or float64.
        key: [B, Hkv, Lk, D]; Hq is a multiple of Hkv (grouped heads are never copied).
        value: [B, Hkv, Lk, Dv].
        mask: a Mask of `attnkit.masks`, or a tensor that broadcasts to [B, Hq, Lq, Lk]: bool with
            True = attend, or float to be added.
        bias: float tensor that broadcasts to [B, Hq, Lq, Lk], of the query's dtype or float32,
            added to the scores after softcap; has a gradient of its own shape.
        scale: 1 / sqrt(D) if None.
        softcap: scores become softcap * tanh(scores / softcap); 0 is off.
        sinks: [Hq], one more logit per head in the softmax, with no value behind it; differentiable.
        alibi: slopes [Hq] or [B, Hq]; adds -slope * |i + off - j|, with the offset of the mask's
            band (Lk - Lq for a bottom-right one, else 0).  No gradient.
        dropout_p: probability with which a weight is dropped.
        seed: of the dropout, 64 bits (int, or int64 tensor of one element); the same seed drops the
            same weights on every backend.  None: drawn from torch's generator.
        return_lse: also return lse.

    Returns:
        out [B, Hq, Lq, Dv] in the query's dtype, and with return_lse (out, lse): lse [B, Hq, Lq] in
        float32 (float64 for float64 inputs), natural logarithm, differentiable.  A query that sees
        no key has out 0, lse -inf (the sink's logit, if there is one) and gradient 0.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: softcap or seed out of range.
        RuntimeError: shapes, dtypes or devices that do not fit; dropout_p outside [0, 1].
        NotImplementedError: complex or nested tensors; a forced backend that cannot serve the call.
    """
    if not _checks.plain(query, key, value):
        query, key, value = _checks.settle(query, key, value)
    shape = query.shape
    if len(shape) != 4 or not shape == key.shape == value.shape:
        _checks.check_sizes(query, key, value)
    args, spec, dropped = gather(
        query, key.shape[2], mask, bias, scale, softcap, sinks, alibi, dropout_p, seed
    )
    out, lse = run(query, key, value, args, spec)
    out = finish(out, dropped)
    return (out, lse) if return_lse else out
