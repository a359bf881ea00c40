"""The functions of flash-attn, by their names and meaning, on every backend: the CPU as well.

Layouts are flash-attn's: [batch, length, heads, head dim], packed [tokens, heads, head dim].
Query i of Lq stands at key i + Lk - Lq (bottom-right): ``window_size`` (left, right) counts from
there, -1 is no limit, and ``causal`` sets right to 0.  ALiBi adds -slope * distance.  Heads of the
query are a multiple of those of key and value.

More than flash-attn takes: float32 and float64 too, any head dim, values of another head dim than
keys, pages of any size.  Where flash-attn gives a row without keys a logsumexp of +inf, it is -inf.
Everything is deterministic, so ``deterministic`` changes nothing, nor does ``num_splits``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnkit import _checks
from attnkit.functional import (
    attention,
    attention_weights,
    decode_attention,
    extend_attention,
    varlen_attention,
)
from attnkit.masks import sliding_window
from attnkit.spec import RotaryTables

Window = tuple[int, int]
NO_WINDOW: Window = (-1, -1)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q [B, Lq, H, D] to k [B, Lk, Hkv, D], v [B, Lk, Hkv, Dv].

    Args:
        q, k, v: of one dtype.
        dropout_p: probability with which a weight is dropped; 0 in evaluation.
        softmax_scale: 1 / sqrt(D) if None.
        causal: right of the window is 0, whatever it was.
        window_size: (left, right) keys around a query's place that it sees, -1 for no limit.
        softcap: scores become softcap * tanh(scores / softcap); 0 is off.
        alibi_slopes: float32 [H] or [B, H].
        deterministic: changes nothing.
        return_attn_probs: also return lse and the weights after dropout.

    Returns:
        out [B, Lq, H, Dv]; with return_attn_probs (out, lse [B, H, Lq] float32, weights
        [B, H, Lq, Lk], empty without dropout).

    Raises what `attnkit.attention` does.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        _expect_dims(name, t, 4, "[batch, length, heads, head dim]")
    query, key, value = (t.transpose(1, 2) for t in (q, k, v))
    left, right = _window(window_size, causal)
    limited = left is not None or right is not None or alibi_slopes is not None
    options: dict[str, Any] = {
        "mask": sliding_window(left, right, bottom_right=True) if limited else None,
        "scale": softmax_scale,
        "softcap": softcap,
        "alibi": alibi_slopes,
        "dropout_p": dropout_p,
    }
    if return_attn_probs and dropout_p:
        options["seed"] = _checks.seed_tensor(None, q)  # the same one for the weights
    out, lse = attention(query, key, value, **options, return_lse=True)
    out = out.transpose(1, 2)
    if not return_attn_probs:
        return out
    weights = attention_weights(query, key, **options) if dropout_p else q.new_empty(0)
    return out, lse, weights


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """:func:`flash_attn_func` with kv [B, Lk, 2, Hkv, D]."""
    _expect_dims("kv", kv, 5, "[batch, length, 2, heads, head dim]")
    k, v = _unbind("kv", kv, 2, 2)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Any:
    """:func:`flash_attn_func` with qkv [B, L, 3, H, D]."""
    _expect_dims("qkv", qkv, 5, "[batch, length, 3, heads, head dim]")
    q, k, v = _unbind("qkv", qkv, 2, 3)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention within N sequences, packed one after the other: q [Tq, H, D], k, v [Tk, Hkv, D].

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 [N + 1], where each sequence begins and the last one ends.
        max_seqlen_q, max_seqlen_k: lengths of the longest.
        block_table: int32 [N, W]; then k, v are pages [P, page, Hkv, D], and key j of sequence n is
            row j % page of page ``block_table[n, j // page]``.  Pages are gathered, which copies.
        alibi_slopes: float32 [H].
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic: as in
            :func:`flash_attn_func`.
        return_attn_probs: also return lse, and an empty tensor in the place of the weights.

    Returns:
        out [Tq, H, Dv]; with return_attn_probs (out, lse [H, Tq], empty).
    """
    if block_table is not None:
        k, v = _gather_pages(k, v, cu_seqlens_k, block_table)
    left, right = _window(window_size, causal)
    out, lse = varlen_attention(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        window=(-1 if left is None else left, -1 if right is None else right),
        scale=softmax_scale,
        softcap=softcap,
        alibi=alibi_slopes,
        dropout_p=dropout_p,
        return_lse=True,
    )
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *args: Any,
    **options: Any,
) -> Any:
    """:func:`flash_attn_varlen_func` with kv [Tk, 2, Hkv, D]."""
    _expect_dims("kv", kv, 4, "[tokens, 2, heads, head dim]")
    k, v = _unbind("kv", kv, 1, 2)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn_varlen_func(q, k, v, *lengths, *args, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Any:
    """:func:`flash_attn_varlen_func` with qkv [T, 3, H, D]."""
    _expect_dims("qkv", qkv, 4, "[tokens, 3, heads, head dim]")
    q, k, v = _unbind("qkv", qkv, 1, 3)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(q, k, v, *lengths, *args, **options)


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Write k, v into the cache, in place, and attend from q [B, Lq, H, D] to what it then holds.

    Args:
        k_cache, v_cache: [N, S, Hkv, D]; with block_table pages [P, page, Hkv, D].
        k, v: [B, n, Hkv, D], written behind the first ``cache_seqlens[b]`` keys.
        rotary_cos, rotary_sin: [positions, rotary dim / 2]; new keys are turned to their slots,
            queries likewise from ``cache_seqlens[b]`` on if causal or with a window, else all to
            that place.
        cache_seqlens: int32 [B], or one int for all; None: the cache is full.
        cache_batch_idx: int32 [B], the row of the cache that holds each sequence.
        cache_leftpad: int32 [B], where each sequence begins in its row.
        block_table: int32 [B, W], pages of each sequence; without cache_batch_idx, cache_leftpad.
        rotary_interleaved: pairs are (2 i, 2 i + 1), not (i, i + rotary dim / 2).
        num_splits: changes nothing; splits depend on the lengths alone.
        return_softmax_lse: also return lse [B, H, Lq] float32.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in :func:`flash_attn_func`.

    Returns:
        out [B, Lq, H, Dv], and with return_softmax_lse (out, lse).  It has no gradient.

    Raises what `attnkit.decode_attention` does, before anything is written, and

    Raises:
        ValueError: arguments that do not go together.
        RuntimeError: new keys that do not fit.
    """
    for name, t in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        _expect_dims(name, t, 4, "4 dimensions, heads before the last")
    if (k is None) != (v is None):
        raise ValueError("k and v are given one without the other, expected both or neither")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin belong together, one of them is missing")
    if k is None and rotary_cos is not None:
        raise ValueError("rotary_cos is given without k, expected new keys to be turned")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens is missing, expected where k is to be written")
    if block_table is not None:
        others = {"cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
        for name, other in others.items():
            if other is not None:
                raise ValueError(f"{name} and block_table are both given, expected one of them")
    left, right = _window(window_size, causal)
    batch = q.shape[0]
    if cache_seqlens is None or isinstance(cache_seqlens, int):
        room = k_cache.shape[1]
        if block_table is not None:
            room *= block_table.shape[1]
        held = room if cache_seqlens is None else cache_seqlens
        lengths = torch.full((batch,), held, dtype=torch.int32, device=q.device)
    else:
        lengths = cache_seqlens
        _checks.per_sequence("cache_seqlens", lengths, torch.int32, (batch,), q)
    keys, values = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    if block_table is None and cache_batch_idx is None:  # the first rows of a larger cache
        keys, values = keys[:batch], values[:batch]
    options: dict[str, Any] = {
        "starts": cache_leftpad,
        "block_table": block_table,
        "batch_index": cache_batch_idx,
        "left": left,
        "right": right,
        "causal": False,
        "scale": softmax_scale,
        "softcap": softcap,
        "alibi": alibi_slopes,
        "return_lse": True,
    }
    query = q.transpose(1, 2)
    if k is None or v is None:
        out, lse = decode_attention(query, keys, values, lengths, **options)
    else:
        for name, t, cache in (("k", k, k_cache), ("v", v, v_cache)):
            _expect_dims(name, t, 4, "[batch, new, heads, head dim]")
            wanted = (batch, k.shape[1], *cache.shape[2:])
            if tuple(t.shape) != wanted:
                raise RuntimeError(f"{name} is {tuple(t.shape)}, expected {wanted}")
            if t.dtype != cache.dtype:
                raise RuntimeError(f"{name} is {t.dtype}, {name}_cache is {cache.dtype}")
        if rotary_cos is not None and rotary_sin is not None:
            # without a mask that looks at positions all queries are rotated by the first one's
            step = 0 if left is right is None else 1
            last = max(k.shape[1] - 1, step * (q.shape[1] - 1))
            options["rotary"] = _rotary_tables(rotary_cos, rotary_sin, rotary_interleaved, q)
            options["query_step"] = step
            _expect_positions(rotary_cos, lengths, last)
        new = (k.transpose(1, 2), v.transpose(1, 2))
        out, lse = extend_attention(query, *new, keys, values, lengths, **options)
    out = out.transpose(1, 2)
    return (out, lse) if return_softmax_lse else out


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Take padding out of hidden_states [B, S, ...] (attention_mask [B, S]: nonzero = real).

    Args:
        unused_mask: [B, S], further places that get room in the packed tensor, but do not count in
            the last result.

    Returns:
        (hidden [T, ...], indices int64 [T] into B * S, cu_seqlens int32 [B + 1], longest length,
        seqused int32 [B]).
    """
    kept = attention_mask.bool() if unused_mask is None else (attention_mask + unused_mask).bool()
    if kept.shape != hidden_states.shape[:2]:
        raise RuntimeError(
            f"attention_mask is {tuple(kept.shape)}, expected {tuple(hidden_states.shape[:2])}"
        )
    counts = kept.sum(dim=1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    offsets = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
    offsets[1:] = counts.cumsum(0)
    longest = int(counts.max()) if len(counts) else 0
    used = attention_mask.bool().sum(dim=1, dtype=torch.int32)
    return hidden_states.flatten(0, 1)[indices], indices, offsets, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put hidden_states [T, ...] back to [B, S, ...], with zeros at the padding."""
    out = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    out = out.index_copy(0, indices, hidden_states)
    return out.unflatten(0, (batch, seqlen))


def _window(window_size: Window, causal: bool) -> tuple[int | None, int | None]:
    left, right = _checks.window(window_size)
    return left, 0 if _checks.flag("causal", causal) else right


def _expect_dims(name: str, t: Any, dims: int, meaning: str) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} is {type(t).__name__}, expected a Tensor")
    if t.dim() != dims:
        raise RuntimeError(f"{name} has shape {tuple(t.shape)}, expected {meaning}")


def _unbind(name: str, t: Tensor, dim: int, parts: int) -> tuple[Tensor, ...]:
    if t.shape[dim] != parts:
        raise RuntimeError(
            f"{name} has shape {tuple(t.shape)}, expected {parts} in dimension {dim}"
        )
    return t.unbind(dim)


def _gather_pages(
    k: Tensor, v: Tensor, cu_seqlens_k: Tensor, block_table: Tensor
) -> tuple[Tensor, Tensor]:
    """The keys and values [Tk, Hkv, .] of pages [P, page, Hkv, .]."""
    offsets = cu_seqlens_k.long()
    lengths = offsets.diff()
    total = int(offsets[-1]) if len(offsets) else 0
    token = torch.arange(total, device=k.device)
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=k.device), lengths)
    place = token - offsets[sequence]
    size = k.shape[1]
    longest = int(lengths.max()) if len(lengths) else 0
    if longest > size * block_table.shape[1]:
        raise RuntimeError(
            f"block_table has room for {size * block_table.shape[1]} keys of a sequence, "
            f"cu_seqlens_k asks for {longest}"
        )
    page = block_table[sequence, place // size].long()
    if total and not 0 <= int(page.min()) <= int(page.max()) < k.shape[0]:
        raise RuntimeError(
            f"block_table names pages {int(page.min())} to {int(page.max())}, expected 0 to "
            f"{k.shape[0] - 1}"
        )
    return k[page, place % size], v[page, place % size]


def _rotary_tables(cos: Tensor, sin: Tensor, interleaved: bool, q: Tensor) -> RotaryTables:
    for name, t in (("rotary_cos", cos), ("rotary_sin", sin)):
        if t.dim() != 2 or t.shape != cos.shape or 2 * t.shape[1] > q.shape[3]:
            raise RuntimeError(
                f"{name} has shape {tuple(t.shape)}, expected [positions, half a rotary dim of at "
                f"most {q.shape[3]}]"
            )
    real = torch.float64 if q.dtype == torch.float64 else torch.float32
    return RotaryTables(cos.to(real), sin.to(real), interleaved)


def _expect_positions(cos: Tensor, lengths: Tensor, last: int) -> None:
    """On the CPU, where a look at the lengths is free: rotary_cos reaches the newest token."""
    if lengths.is_cpu and lengths.numel() and not torch.compiler.is_compiling():
        last += int(lengths.max())
        if last >= len(cos):
            raise RuntimeError(f"rotary_cos has {len(cos)} positions, a token stands at {last}")
