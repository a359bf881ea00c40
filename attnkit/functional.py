"""Public functions.  They check the arguments once, choose a backend, and record the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from attnkit._autograd import run
from attnkit.spec import AttentionSpec, TensorArgs


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
    """As torch.nn.functional.scaled_dot_product_attention; thin first version."""
    if attn_mask is not None and is_causal:
        raise RuntimeError("attn_mask and is_causal=True were both given")
    lead = query.shape[:-2]
    q = query.reshape(-1, lead[-1] if lead else 1, *query.shape[-2:])
    k = key.reshape(-1, key.shape[-3] if key.dim() > 2 else 1, *key.shape[-2:])
    v = value.reshape(-1, value.shape[-3] if value.dim() > 2 else 1, *value.shape[-2:])
    seed = None
    if dropout_p > 0:
        seed = torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=q.device)
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.shape[-1] else 1.0
    spec = AttentionSpec(scale, None, 0 if is_causal else None, False, 0.0, dropout_p)
    out, _ = run(q, k, v, TensorArgs(bias=attn_mask, seed=seed), spec)
    return out.reshape(*lead, *out.shape[-2:])


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The full call; thin first version."""
    if scale is None:
        scale = query.shape[-1] ** -0.5 if query.shape[-1] else 1.0
    if dropout_p > 0 and seed is None:
        seed = torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=query.device)
    if alibi is not None and alibi.dim() == 1:
        alibi = alibi[None]
    dense = bias if mask is None else mask
    spec = AttentionSpec(scale, softcap=softcap, dropout_p=dropout_p)
    out, lse = run(query, key, value, TensorArgs(bias=dense, sinks=sinks, alibi=alibi, seed=seed), spec)
    return (out, lse) if return_lse else out
