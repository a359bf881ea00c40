"""Public functions.  They check the arguments once, choose a backend, and record the gradient.

    out = dropout(softmax(scale * query key^T + bias, over visible keys)) value
    lse = log sum exp of each row

The way of a call: the door here, `_autograd.run`, `dispatch.select`, one backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from attnkit import _cache_checks, _checks, _shapes, dispatch
from attnkit._autograd import NO_ARGS, expanded, in_transform, run, run_decode, run_extend
from attnkit._options import gather, zeros
from attnkit.backends import reference
from attnkit.masks import Mask
from attnkit.spec import NO_CACHE, NO_ROTARY, AttentionSpec, CacheArgs, RotaryTables, TensorArgs


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
    """softmax(scale * query key^T + attn_mask) value, as torch.nn.functional's own.

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
            outside [0, 1]; q, k, v sharded by torch's context_parallel, or DTensors sharded over
            anything but batch and heads.
        NotImplementedError: complex or nested tensors; a forced backend that cannot serve the call.
    """
    if (
        (is_causal is False or is_causal is True)
        and (enable_gqa is False or enable_gqa is True)
        and _checks.plain(query, key, value)
        and (attn_mask is None or (type(attn_mask) is Tensor and not is_causal))
    ):
        shape = query.shape
        if len(shape) == 4 and (
            shape == key.shape == value.shape or _shapes.fit(shape, key.shape, value.shape)
        ):
            if attn_mask is None and dropout_p == 0.0 and (scale is None or type(scale) is float):
                if scale is None:
                    scale = shape[3] ** -0.5 if shape[3] else 1.0
                spec = AttentionSpec(scale, None, 0 if is_causal else None)
                return run(query, key, value, NO_ARGS, spec)[0]
            plain = (*shape[:3], key.shape[2])
            return _sdpa_4d(query, key, value, attn_mask, plain, is_causal, dropout_p, scale)
    # a CausalBias is not asked, and never looked into: its storage is uninitialised
    bias: Any = attn_mask if _checks.is_causal_bias(attn_mask) else None
    tensors = (query, key, value, None if bias is not None else attn_mask)
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
    bottom_right = False
    if bias is not None:
        if is_causal:
            raise ValueError("CausalBias should not be used with causal=True (argument is_causal)")
        found, wanted = (bias.seq_len_q, bias.seq_len_kv), (query.shape[-2], key.shape[-2])
        if found != wanted:
            raise RuntimeError(f"attn_mask is a CausalBias for lengths {found}, expected {wanted}")
        bottom_right = bias.variant.name == "LOWER_RIGHT"
        attn_mask, is_causal = None, True
    if _checks.flag("is_causal", is_causal) and attn_mask is not None:
        raise RuntimeError(
            "attn_mask was given together with is_causal=True, expected one of them: Explicit "
            "attn_mask should not be set when is_causal=True"
        )
    if any(map(_checks.is_sharded, (query, key, value))):
        from attnkit import _sharded

        options = {
            "attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale,
            "enable_gqa": enable_gqa,
        }  # fmt: skip
        if bottom_right:
            raise NotImplementedError("attn_mask is a CausalBias, with DTensors expected a Tensor")
        shares: Tensor = _sharded.attend(scaled_dot_product_attention, query, key, value, options)
        return shares
    query, key, value = _checks.settle(query, key, value)
    gqa = _checks.flag("enable_gqa", enable_gqa)
    q, k, v, scores = _shapes.to_4d(query, key, value, gqa)
    out = _sdpa_4d(q, k, v, attn_mask, scores, is_causal, dropout_p, scale, bottom_right)
    return out if len(scores) == 4 else out.reshape(*scores[:-1], v.shape[3])


def _sdpa_4d(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    scores: tuple[int, ...],
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
    bottom_right: bool = False,
) -> Tensor:
    """[B, H, L, Ev] of checked q, k, v; attn_mask broadcasts to `scores`, of the caller's rank."""
    dense = None
    if attn_mask is not None:
        attn_mask = _checks.addend("attn_mask", attn_mask, q)
        dense = _shapes.mask_to_4d(attn_mask, scores)
    args, spec, dropped = gather(q, k.shape[2], scale=scale, dropout_p=dropout_p, dense=dense)
    if is_causal:
        spec = spec._replace(right=0, bottom_right=bottom_right)
    if dropped:
        return zeros((*q.shape[:3], v.shape[3]), q, q, k, v, args.bias)
    return run(q, k, v, args, spec)[0]


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
    """The full call: softmax over visible keys of softcap(scale q k^T) - alibi distance + bias.

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
        sinks: [Hq], one more logit per head, with no value behind it; differentiable.
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
        if any(map(_checks.is_sharded, (query, key, value))):
            from attnkit import _sharded

            options = {
                "mask": mask, "bias": bias, "scale": scale, "softcap": softcap, "sinks": sinks,
                "alibi": alibi, "dropout_p": dropout_p, "seed": seed, "return_lse": return_lse,
            }  # fmt: skip
            shares: Tensor = _sharded.attend(attention, query, key, value, options)
            return shares
        query, key, value = _checks.settle(query, key, value)
    shape = query.shape
    if len(shape) != 4 or not shape == key.shape == value.shape:
        _checks.check_sizes(query, key, value)
    args, spec, dropped = gather(
        query, key.shape[2], mask, bias, scale, softcap, sinks, alibi, dropout_p, seed
    )
    out, lse = run(query, key, value, args, spec)
    if dropped:
        out = zeros(out.shape, query, query, key, value, args.bias, args.sinks)
    return (out, lse) if return_lse else out


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    bottom_right: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of N sequences that are packed one after the other, without padding.

    Args:
        query: [Tq, Hq, D], all queries; sequence n has rows cu_seqlens_q[n] to cu_seqlens_q[n + 1].
        key: [Tk, Hkv, D]; Hq is a multiple of Hkv.
        value: [Tk, Hkv, Dv].
        cu_seqlens_q, cu_seqlens_k: int32 or int64 [N + 1], starting with 0, never falling.  On the
            CPU their values are checked; on a GPU, and in a compiled graph, they are trusted.
        max_seqlen_q, max_seqlen_k: longest length, as flash-attn wants to know it; not needed here.
        causal: query i of a sequence sees its keys j <= i + off.
        window: (left, right) keys around i + off that are seen, -1 for no limit.
        bottom_right: off is the sequence's number of keys less that of its queries, in place of 0.
        scale, softcap, sinks, dropout_p, seed, return_lse: as in `attention`.
        alibi: slopes [Hq].

    Returns:
        out [Tq, Hq, Dv], and with return_lse (out, lse): lse [Hq, Tq] in float32 (float64).  Rows
        that belong to no sequence get out 0 and lse -inf.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: offsets, window or softcap out of range.
        RuntimeError: shapes, dtypes or devices that do not fit; dropout_p outside [0, 1].
        NotImplementedError: complex or nested tensors; a forced backend that cannot serve the call.
    """
    query, key, value = _checks.settle(query, key, value)
    _checks.check_packed(query, key, value)
    cu_q = _checks.offsets("cu_seqlens_q", cu_seqlens_q, query)
    cu_k = _checks.offsets("cu_seqlens_k", cu_seqlens_k, key)
    if cu_q.shape != cu_k.shape:
        raise RuntimeError(
            f"cu_seqlens_k has {cu_k.shape[0]} entries, cu_seqlens_q has {cu_q.shape[0]}"
        )
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if longest is not None:
            _checks.count(name, longest)
    left, right = _checks.window(window)
    if _checks.flag("causal", causal):
        right = 0
    q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
    args, spec, dropped = gather(
        q,
        k.shape[2],
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        alibi=alibi,
        dropout_p=dropout_p,
        seed=seed,
    )
    args = args._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    spec = spec._replace(
        left=left, right=right, bottom_right=_checks.flag("bottom_right", bottom_right)
    )
    out, lse = run(q, k, v, args, spec)
    if dropped:
        out = zeros(out.shape, q, q, k, v, args.sinks)
    out = out[0].transpose(0, 1)
    return (out, lse[0]) if return_lse else out


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    rows: int | Sequence[int] | Tensor | None = None,
    heads: int | Sequence[int] | Tensor | None = None,
) -> Tensor:
    """The weights that `attention` gives the values, after dropout: for looking at, or for a loss.

    Plain differentiable PyTorch that holds the scores of the chosen rows and heads; the fast path
    never computes them.  With the seed of an `attention` call these are the weights of that call.

    Args:
        query: [B, Hq, Lq, D].
        key: [B, Hkv, Lk, D].
        mask, bias, scale, softcap, sinks, alibi, dropout_p, seed: as in `attention`.
        rows: indices of the wanted queries; None: all of them.
        heads: indices of the wanted query heads; None: all of them.

    Returns:
        [B, heads, rows, Lk] in the query's dtype, computed in float32 (float64).  A row sums to 1,
        less what went to the sink and to dropout; one that sees no key is 0.

    Raises:
        IndexError: rows or heads out of range.
        TypeError, ValueError, RuntimeError, NotImplementedError: as in `attention`.
    """
    query, key, _ = _checks.settle(query, key, key)
    _checks.check_sizes(query, key, key)
    args, spec, dropped = gather(
        query, key.shape[2], mask, bias, scale, softcap, sinks, alibi, dropout_p, seed
    )
    chosen_rows = _checks.indices("rows", rows, query, 2)
    chosen_heads = _checks.indices("heads", heads, query, 1)
    full = expanded(args, query, key)
    weights = reference.weights(query, key, full, spec, chosen_rows, chosen_heads)
    if dropped:
        weights = zeros(weights.shape, query, query, key, args.bias, args.sinks)
    return weights


def decode_attention(
    query: Tensor,
    cache_key: Tensor,
    cache_value: Tensor,
    lengths: Tensor,
    *,
    starts: Tensor | None = None,
    block_table: Tensor | None = None,
    batch_index: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    keep: Tensor | None = None,
    left: int | None = None,
    right: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest queries to a cache that already holds their own keys.

    Query t of Lq stands at position lengths[b] - Lq + t of sequence b; slots at or beyond
    lengths[b] are never read.  For inference: it has no gradient.

    The cache has N rows of S slots.  Row b is sequence b, and its capacity is S, unless the cache
    is *paged*: then slot j of sequence b is slot j % S of row (page) block_table[b, j // S], and
    the capacity is S times the width of the table.  Any S and any strides will do: for memory laid
    out as [pages, S, Hkv, D], pass its transpose(1, 2).  Pages change no bit of the result (Kwon
    et al.: Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023).

    Args:
        query: [B, Hq, Lq, D].
        cache_key: [N, Hkv, S, D]; Hq is a multiple of Hkv.  In the query's dtype; or *quantised*,
            int8 or float8_e4m3fn, with key_scale and value_scale, for queries up to float32.
        cache_value: [N, Hkv, S, Dv], in the dtype of cache_key.
        lengths: int32 [B], filled slots of each sequence, the new keys included.
        starts: int32 [B], slots before starts[b] are hidden and not read (left padding).
        block_table: int32 [B, W], the pages of each sequence; entries past its length may hold
            anything.
        batch_index: int32 [B], the row of the cache that holds each sequence, in place of b.
        key_scale, value_scale: float32 [N, Hkv, S], what a stored key or value is multiplied with.
        keep: bool [B, capacity], True = attend; hides slots.
        left: keys before a query's own position that it sees; None: all of them.
        right: keys after it, likewise, where `causal` is False.
        causal: a query sees no key after its own position, whatever `right` says.
        scale, softcap, sinks, alibi, return_lse: as in `attention`; ALiBi counts from the position.

    Returns:
        out [B, Hq, Lq, Dv], and with return_lse (out, lse): lse [B, Hq, Lq].

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: left or softcap out of range.
        RuntimeError: shapes, dtypes or devices that do not fit; on the CPU, before anything is
            read, lengths beyond the capacity and rows that the cache does not have; an input that
            requires a gradient while gradients are recorded.
        NotImplementedError: complex or nested tensors; a forced backend that cannot serve the call.
    """
    cache = CacheArgs(starts, block_table, batch_index, key_scale, value_scale)
    query, cache_key, cache_value, capacity = _on_cache(query, cache_key, cache_value, cache)
    _refuse_gradient("decode_attention", query, cache_key, cache_value)
    args, spec = _decoding(
        query, capacity, lengths, keep, left, right, causal, scale, softcap, sinks, alibi
    )
    out, lse = run_decode(query, cache_key, cache_value, args, spec, cache)
    return (out, lse) if return_lse else out


def extend_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache_key: Tensor,
    cache_value: Tensor,
    lengths: Tensor,
    *,
    starts: Tensor | None = None,
    block_table: Tensor | None = None,
    batch_index: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    keep: Tensor | None = None,
    left: int | None = None,
    right: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    rotary: RotaryTables | None = None,
    query_step: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Write new keys and values into a cache, and attend to it from the queries that came along.

    `decode_attention` after n new tokens of each sequence were written to the slots from lengths[b]
    on, where the backend can in one operator.  Query t of Lq stands at position lengths[b] + n - Lq
    + t.

    Args:
        query: [B, Hq, Lq, D].
        key: [B, Hkv, n, D], the new tokens; in the cache's dtype, or, for a quantised cache, in
            float32, bfloat16 or float16.
        value: [B, Hkv, n, Dv], in the key's dtype.
        cache_key, cache_value, key_scale, value_scale: as in `decode_attention`; written in place.
        lengths: int32 [B], filled slots of each sequence, before the new tokens; not changed.
        rotary: the angles by which keys are rotated on their way, each by those of its slot.
        query_step: 0 or 1: rotate queries, too, query t as one at position lengths[b] + t *
            query_step; None: leave them.
        starts, block_table, batch_index: as in `decode_attention`.
        keep, left, right, causal: as in `decode_attention`.
        scale, softcap, sinks, alibi, return_lse: as in `decode_attention`.

    Returns:
        out [B, Hq, Lq, Dv], and with return_lse (out, lse): lse [B, Hq, Lq].

    Raises what `decode_attention` does; nothing is written then.
    """
    cache = CacheArgs(starts, block_table, batch_index, key_scale, value_scale)
    query, cache_key, cache_value, capacity = _on_cache(query, cache_key, cache_value, cache)
    _cache_checks.check_new(query, key, value, cache_key, cache_value)
    _refuse_gradient("extend_attention", query, cache_key, cache_value, key, value)
    if query_step is not None and (rotary is None or query_step not in (0, 1)):
        raise ValueError(f"query_step is {query_step}, expected 0 or 1, and given with rotary")
    args, spec = _decoding(
        query, capacity, lengths, keep, left, right, causal, scale, softcap, sinks, alibi
    )
    out, lse = run_extend(
        query,
        key,
        value,
        cache_key,
        cache_value,
        args,
        spec,
        cache,
        rotary or NO_ROTARY,
        query_step,
    )
    return (out, lse) if return_lse else out


def extend_ordinary(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache_key: Tensor,
    cache_value: Tensor,
    lengths: Tensor,
    keep: Tensor | None,
) -> Tensor:
    """`extend_attention` without options, of what `_cache_checks.ordinary` has let pass."""
    _refuse_gradient("extend_attention", query, cache_key, cache_value, key, value)
    d = query.shape[3]
    args, spec = TensorArgs(None, None, keep, lengths), AttentionSpec(d**-0.5, None, 0, True)
    return run_extend(
        query, key, value, cache_key, cache_value, args, spec, NO_CACHE, NO_ROTARY, None
    )[0]


def _on_cache(
    query: Tensor, key: Tensor, value: Tensor, cache: CacheArgs
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Query and cache, checked, and the slots of a sequence."""
    if _cache_checks.quantised(key, cache):
        query, _, _ = _checks.settle(query, query, query)
        _cache_checks.check_scales(query, key, value, cache)
    elif not _checks.plain(query, key, value):
        query, key, value = _checks.settle(query, key, value)
    return query, key, value, _cache_checks.check_rows(query, key, value, cache)


def _refuse_gradient(function: str, *tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        names = ("query", "cache_key", "cache_value", "key", "value")
        name = next(n for n, t in zip(names, tensors, strict=False) if t.requires_grad)
        raise RuntimeError(
            f"{name} requires a gradient, expected none: {function} has no backward, "
            "call it under torch.no_grad()"
        )


def _decoding(
    query: Tensor,
    capacity: int,
    lengths: Tensor,
    keep: Tensor | None,
    left: int | None,
    right: int | None,
    causal: bool,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    alibi: Tensor | None,
) -> tuple[TensorArgs, AttentionSpec]:
    """The options of a call on a cache, checked."""
    _checks.per_sequence("lengths", lengths, torch.int32, (query.shape[0],), query)
    if keep is not None:
        _checks.per_sequence("keep", keep, torch.bool, (query.shape[0], capacity), query)
    if left is not None or right is not None:
        for name, bound in (("left", left), ("right", right)):
            if bound is not None and _checks.count(name, bound) < 0:
                raise ValueError(f"{name} is {bound}, expected 0 or more, or None for no limit")
    given, spec, _ = gather(query, capacity, None, None, scale, softcap, sinks, alibi)
    args = TensorArgs(None, given.sinks, keep, lengths, None, None, None, given.alibi)
    right = 0 if _checks.flag("causal", causal) else right
    return args, AttentionSpec(spec.scale, left, right, True, spec.softcap)


class Explanation(dict[str, "str | None"]):
    """What each backend says to a call: None, or why it cannot serve it.  Prints as a small table.

    Attributes:
        chosen: name of the backend that would run, or None where no one can.
        note: a sentence where the call goes another way than through a backend, else "".
    """

    chosen: str | None = None
    note: str = ""

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        lines = [
            f"{name:{width}}  {'ok' if reason is None else reason}"
            f"{'  <- chosen' if name == self.chosen else ''}"
            for name, reason in self.items()
        ]
        return "\n".join([*lines, self.note] if self.note else lines)


def explain(
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
) -> Explanation:
    """Which backend an `attention` call with these arguments would run on, and why not the others.

    Nothing is computed.  Takes the arguments of `attention`, and raises what it would raise.

    Returns:
        A dict from each backend's name to None or its reason, with `chosen` and `note`.
    """
    query, key, value = _checks.settle(query, key, value)
    _checks.check_sizes(query, key, value)
    args, spec, _ = gather(
        query, key.shape[2], mask, bias, scale, softcap, sinks, alibi, dropout_p, seed
    )
    answers = Explanation(dispatch.explain(query, key, value, expanded(args, query, key), spec))
    forced = dispatch.forced_backend()
    usable = [name for name, reason in answers.items() if reason is None]
    if forced is not None:
        answers.chosen = forced if forced in usable else None
    else:
        answers.chosen = usable[0] if usable else None
    if in_transform():
        answers.chosen = None
        answers.note = (
            "under torch.func transforms and forward-mode AD every call runs as differentiable "
            "PyTorch operations (those of the reference), whatever the backend"
        )
    elif torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (query, key, value, args.bias, args.sinks)
    ):
        answers.note = (
            "second derivatives are recomputed as differentiable PyTorch operations (those of the "
            "reference), whatever the backend"
        )
    return answers
