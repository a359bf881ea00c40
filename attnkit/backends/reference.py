"""The definition of attention in plain PyTorch: slow, and right.

    s_ij = softcap(scale * q_i . k_j) - slope * |i + off - j| + bias_ij   (key j visible to query i)
    p_ij = exp(s_ij - lse_i),   lse_i = log(sum over visible j of exp(s_ij) + exp(sink))
    out_i = sum over visible j of dropout(p_ij) v_j

All of it is computed in float32, or float64 for float64 inputs.  Every other backend is tested
against this one.  `attend` is made of differentiable operations without a look at any value, so it
also serves vmap, functorch, forward-mode AD, higher derivatives and compiled graphs.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit.spec import (
    BLOCK,
    NO_CACHE,
    NO_ROTARY,
    AttentionSpec,
    CacheArgs,
    RotaryTables,
    TensorArgs,
)

_INF = float("inf")


def supports(q: Tensor, k: Tensor, v: Tensor, args: TensorArgs, spec: AttentionSpec) -> str | None:
    """Why this call cannot be served, or None."""
    if args.cu_seqlens_q is not None and (args.lengths is not None or args.blocks is not None):
        return "packed sequences go without lengths and blocks"
    return None


def supports_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    args: TensorArgs,
    spec: AttentionSpec,
    cache: CacheArgs = NO_CACHE,
) -> str | None:
    """Why this decoding step cannot be served, or None."""
    if spec.dropout_p > 0:
        return "decoding goes without dropout"
    if args.lengths is None or args.cu_seqlens_q is not None:
        return "decoding takes lengths, and no packed sequences"
    return None


def forward(
    q: Tensor, k: Tensor, v: Tensor, args: TensorArgs, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Lq, Dv] in q's dtype and lse [B, Hq, Lq] in float32 (float64)."""
    with torch.no_grad():
        return attend(q, k, v, args, spec)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    args: TensorArgs,
    spec: AttentionSpec,
    needs: tuple[bool, bool, bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, bias and sinks (None where `needs` is false).

    dbias has size 1 in every dimension along which args.bias is broadcast (stride 0).
    """
    bias = args.bias
    for d in range(0 if bias is None else 4):
        if bias is not None and bias.stride(d) == 0:
            bias = bias.narrow(d, 0, min(bias.shape[d], 1))

    def leaf(t: Tensor | None, need: bool) -> Tensor | None:
        return None if t is None else t.detach().requires_grad_(need)

    q, k, v = (t.detach().requires_grad_(need) for t, need in zip((q, k, v), needs, strict=False))
    bias, sinks = leaf(bias, needs[3]), leaf(args.sinks, needs[4])
    if not any(t is not None and t.requires_grad for t in (q, k, v, bias, sinks)):
        return None, None, None, None, None
    with torch.enable_grad():
        wide = bias
        if bias is not None and args.bias is not None and bias.dtype != torch.bool:
            # widened first: the sum over what was stretched is taken in full precision
            wide = bias.to(torch.promote_types(bias.dtype, lse.dtype)).expand(args.bias.shape)
        outputs = attend(q, k, v, args._replace(bias=wide, sinks=sinks), spec)
    wanted = [t for t in (q, k, v, bias, sinks) if t is not None and t.requires_grad]
    above = (dout, torch.zeros_like(lse) if dlse is None else dlse)
    # lse has no gradient where only v wants one
    pairs = [(y, g) for y, g in zip(outputs, above, strict=True) if y.requires_grad]
    with without_autocast(q):
        grads = torch.autograd.grad(
            [y for y, _ in pairs], wanted, [g for _, g in pairs], materialize_grads=True
        )
    by_leaf = dict(zip(map(id, wanted), grads, strict=True))
    dq, dk, dv, dbias, dsinks = (by_leaf.get(id(t)) for t in (q, k, v, bias, sinks))
    return dq, dk, dv, dbias, dsinks


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    args: TensorArgs,
    spec: AttentionSpec,
    cache: CacheArgs = NO_CACHE,
) -> tuple[Tensor, Tensor]:
    """Attention of the newest Lq queries to a cache k, v [N, Hkv, S, D] of `lengths` keys.

    Query t of sequence b sits at position lengths[b] - Lq + t; the band and ALiBi count from there.
    """
    assert args.lengths is not None
    with torch.no_grad():
        off = args.lengths.long().view(-1, 1, 1, 1) - q.shape[2]
        filled = _filled(k, args.lengths, cache)
        k, v = (
            _in_order(t, scale, filled, cache)
            for t, scale in ((k, cache.k_scale), (v, cache.v_scale))
        )
        if cache.starts is not None:
            args = args._replace(keep=filled if args.keep is None else filled & args.keep)
        return _attend(q, k, v, args, spec, off)


def supports_extend(*call: Any) -> str:
    """Why appending and attending take two calls."""
    return "it has no operator that appends and attends"


def supports_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> str | None:
    """Why k and v cannot be written into the cache, or None."""
    return None


def append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    cache: CacheArgs = NO_CACHE,
    rotary: RotaryTables = NO_ROTARY,
) -> None:
    """Write k, v [B, Hkv, n, .] into slots lengths[b] to lengths[b] + n - 1 of the cache, in place.

    Keys are rotated first, each by the angles of its slot; 8-bit caches get `quantise`d rows.

    Raises:
        RuntimeError: a slot that does not exist (checked on the CPU, before anything is written).
    """
    with torch.no_grad():
        slots = lengths.long()[:, None] + torch.arange(k.shape[2], device=k.device)
        places = _places(k_cache, slots, cache)
        if rotary.cos is not None and rotary.sin is not None:
            cos, sin = (t[slots][:, None] for t in (rotary.cos, rotary.sin))
            k = rotated(k, cos, sin, rotary.interleaved)
        for new, old, scale in ((k, k_cache, cache.k_scale), (v, v_cache, cache.v_scale)):
            if scale is None:
                _write(new.to(old.dtype), old, places)
            else:
                stored, factor = quantise(new, old.dtype)
                _write(stored.view(torch.int8), old.view(torch.int8), places)
                _write(factor, scale, places)


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., D] as (int8 or float8_e4m3fn [..., D], fp32 scale [...]), whose product is nearly x.

    The largest magnitude of a vector becomes the largest number.  The scale of zeros is 0; that of
    a vector with NaN or infinity in it is NaN, so that it cannot pass for a good one.
    """
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    x = x.float()
    scale = x.abs().amax(-1) / largest
    scale = torch.where(scale.isfinite(), scale, math.nan)
    unit = torch.where(scale[..., None] > 0, x / scale[..., None], 0.0)
    unit = unit.round() if dtype == torch.int8 else unit
    return unit.clamp(-largest, largest).to(dtype), scale


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [..., D] with its first dimensions rotated by cos and sin [..., rotary_dim / 2].

    In the dtype of cos; leading dimensions broadcast.
    """
    turned, rest = x.to(cos.dtype).tensor_split((2 * cos.shape[-1],), -1)
    a, b = turned.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turned.chunk(2, -1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned, rest), -1)


def rotated_queries(q: Tensor, lengths: Tensor, step: int, rotary: RotaryTables) -> Tensor:
    """q [B, H, L, D] with query t of sequence b rotated as one at lengths[b] + t * step."""
    assert rotary.cos is not None
    assert rotary.sin is not None
    positions = lengths.long()[:, None] + step * torch.arange(q.shape[2], device=q.device)
    _refuse(positions, positions >= len(rotary.cos), "positions of queries", len(rotary.cos) - 1)
    cos, sin = (t[positions][:, None] for t in (rotary.cos, rotary.sin))
    return rotated(q, cos, sin, rotary.interleaved).to(q.dtype)


def _write(new: Tensor, old: Tensor, places: tuple[Tensor, Tensor]) -> None:
    pages, rows = places
    old[pages, :, rows] = new.transpose(1, 2)


def _filled(k: Tensor, lengths: Tensor, cache: CacheArgs) -> Tensor:
    """Which slots [B, capacity] of each sequence hold what it sees."""
    pages = 1 if cache.block_table is None else cache.block_table.shape[1]
    slots = torch.arange(pages * k.shape[2], device=k.device)
    _refuse(lengths, (lengths < 0) | (lengths > len(slots)), "lengths", len(slots))
    filled = slots < lengths[:, None]
    return filled if cache.starts is None else filled & (slots >= cache.starts[:, None])


def _in_order(t: Tensor, scale: Tensor | None, filled: Tensor, cache: CacheArgs) -> Tensor:
    """The values [B, Hkv, capacity, D] of a cache by sequence; anything where not `filled`."""
    if scale is not None:
        t = t.float() * scale[..., None]
    if cache.batch_index is None and cache.block_table is None:
        return t
    slots = torch.arange(filled.shape[1], device=t.device).expand(filled.shape)
    pages, rows = _places(t, slots, cache, filled)
    return t[pages, :, rows].transpose(1, 2)


def _places(
    t: Tensor, slots: Tensor, cache: CacheArgs, wanted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(row of the cache, slot in it), each [B, n], of slots [B, n]; 0, 0 of those not wanted."""
    wanted = torch.ones_like(slots, dtype=torch.bool) if wanted is None else wanted
    size, (batch, _) = t.shape[2], slots.shape
    table, index = cache.block_table, cache.batch_index
    if table is None:
        table = (torch.arange(batch, device=t.device) if index is None else index)[:, None]
    capacity = size * table.shape[1]
    _refuse(slots, wanted & ((slots < 0) | (slots >= capacity)), "a slot", capacity - 1)
    slots = torch.where(wanted, slots, 0)
    pages = torch.where(wanted, table.long().gather(1, slots // max(size, 1)), 0)
    name = "batch_index" if cache.block_table is None else "block_table"
    _refuse(pages, (pages < 0) | (wanted & (pages >= len(t))), name, len(t) - 1)
    return pages, slots % max(size, 1)


def _refuse(found: Tensor, wrong: Tensor, name: str, most: int) -> None:
    """RuntimeError if there is something wrong, on the CPU: elsewhere a look would be a wait."""
    if found.is_cpu and not torch.compiler.is_compiling() and bool(wrong.any()):
        raise RuntimeError(f"{name} is {int(found[wrong][0])}, expected 0 to {most}")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    args: TensorArgs,
    spec: AttentionSpec,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) like `forward`, out of differentiable operations alone.

    rows: int64 indices of the wanted queries (None: all); the result has these rows only.
    """
    return _attend(q, k, v, args, spec, None, rows)


def weights(
    q: Tensor,
    k: Tensor,
    args: TensorArgs,
    spec: AttentionSpec,
    rows: Tensor | None = None,
    heads: Tensor | None = None,
) -> Tensor:
    """The weights [B, H, R, Lk] in q's dtype that `attend` gives the values, after dropout.

    rows, heads: int64 indices of the wanted queries and query heads (None: all).  Differentiable.
    """
    with without_autocast(q):
        return _weights(q, k, args, spec, None, rows, heads)[0].to(q.dtype)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    args: TensorArgs,
    spec: AttentionSpec,
    off: Tensor | None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    with without_autocast(q):
        p, lse, visible = _weights(q, k, args, spec, off, rows)
        return _mix(p, v.to(p.dtype), visible).to(q.dtype), lse


def without_autocast(q: Tensor) -> AbstractContextManager[None]:
    """Autocast switched off, where q's device has one (meta tensors have none)."""
    if torch.amp.is_autocast_available(q.device.type):
        return torch.autocast(q.device.type, enabled=False)
    return nullcontext()


class _Grid(NamedTuple):
    """Where the rows and columns of the score matrix stand, each broadcastable to [B, H, R, Lk]."""

    i: Tensor  # index of the query, in its own sequence
    j: Tensor  # index of the key, in its own sequence
    off: Tensor | int  # i + off is the key that the query is aligned with
    b: Tensor  # index of the sequence
    h: Tensor  # index of the query head
    same: Tensor | None  # packed: query and key belong to the same sequence


def _grid(
    q: Tensor,
    k: Tensor,
    args: TensorArgs,
    spec: AttentionSpec,
    off: Tensor | None,
    rows: Tensor | None,
    heads: Tensor | None,
) -> _Grid:
    def count(n: int) -> Tensor:
        return torch.arange(n, device=q.device)

    (batch, hq, lq, _), lk = q.shape, k.shape[2]
    i = count(lq) if rows is None else rows
    j = count(lk)
    h = (count(hq) if heads is None else heads).view(-1, 1, 1)
    if args.cu_seqlens_q is None or args.cu_seqlens_k is None:
        b = count(batch).view(-1, 1, 1, 1)
        shift = (lk - lq if spec.bottom_right else 0) if off is None else off
        return _Grid(i[:, None], j, shift, b, h, None)
    cu_q, cu_k = args.cu_seqlens_q.long(), args.cu_seqlens_k.long()
    n = cu_q.shape[0] - 1
    seq_q = (i[:, None] >= cu_q[1:]).sum(1)  # n for rows past the last sequence
    seq_k = (j[:, None] >= cu_k[1:]).sum(1)
    same = (seq_q[:, None] == seq_k) & (seq_q < n)[:, None]
    shift = 0
    if spec.bottom_right:
        longer = torch.cat([cu_k.diff() - cu_q.diff(), cu_q.new_zeros(1)])
        shift = longer[seq_q][:, None]
    return _Grid((i - cu_q[seq_q])[:, None], j - cu_k[seq_k], shift, seq_q[:, None], h, same)


def _visible(grid: _Grid, args: TensorArgs, spec: AttentionSpec) -> Tensor:
    """Which key each query sees: bool, broadcastable to [B, H, R, Lk]."""
    distance = grid.j - (grid.i + grid.off)
    seen = distance == distance
    if grid.same is not None:
        seen = seen & grid.same
    if spec.left is not None:
        seen = seen & (distance >= -spec.left)
    if spec.right is not None:
        seen = seen & (distance <= spec.right)
    if args.keep is not None:
        seen = seen & args.keep[:, None, None, :]
    if args.lengths is not None:
        seen = seen & (grid.j < args.lengths[:, None, None, None])
    if args.q_segments is not None and args.k_segments is not None:
        seen = seen & (args.q_segments[:, None, :, None] == args.k_segments[:, None, None, :])
    if args.blocks is not None:
        by_row = args.blocks.index_select(2, grid.i[:, 0] // BLOCK)
        seen = seen & by_row.index_select(3, grid.j // BLOCK)
    if args.bias is not None:
        seen = seen & (args.bias if args.bias.dtype == torch.bool else args.bias != -_INF)
    return seen


def _weights(
    q: Tensor,
    k: Tensor,
    args: TensorArgs,
    spec: AttentionSpec,
    off: Tensor | None = None,
    rows: Tensor | None = None,
    heads: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights after dropout [B, H, R, Lk], lse [B, H, R], visible)."""
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    grid = _grid(q, k, args, spec, off, rows, heads)
    q, k, args = _select(q, k, args, rows, heads)
    visible = _visible(grid, args, spec)
    s = _scores(q.to(acc), k.to(acc), visible) * spec.scale  # [B, H, R, Lk]
    if spec.softcap > 0:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    if args.alibi is not None:
        s = s - args.alibi.to(acc)[:, :, None, None] * (grid.i + grid.off - grid.j).abs()
    if args.bias is not None and args.bias.dtype != torch.bool:
        s = s + args.bias
    s = torch.where(visible, s, -_INF)

    # A sink is a key without a value.  A row without any logit gets one of 0 in its place, which
    # leaves its weights at exactly 0 and keeps NaN out of the gradient.
    sink = s.new_full((1,), -_INF) if args.sinks is None else args.sinks.to(acc)
    sink = sink[:, None, None]
    dead = (s == -_INF).all(-1, keepdim=True) & (sink == -_INF)
    logits = torch.cat([s, torch.where(dead, 0.0, sink)], -1)
    top = logits.detach().amax(-1, keepdim=True)
    e = torch.exp(logits - top)
    total = e.sum(-1, keepdim=True)
    # not logsumexp, whose derivative exp(s - lse) is 1, not 1 / n, in a row of the lowest float
    lse = torch.where(dead, -_INF, top + total.log())[..., 0]
    p = torch.where(visible, (e / total)[..., :-1], 0.0)
    if spec.dropout_p > 0:
        assert args.seed is not None
        # an integer threshold: p in float32 would differ from p in float64 for some p
        kept = philox(args.seed, grid.b, grid.h, grid.i, grid.j) >> 8 >= math.ceil(
            spec.dropout_p * 2**24
        )
        p = torch.where(kept, p / (1.0 - spec.dropout_p) if spec.dropout_p < 1 else 0.0, 0.0)
    return p, lse, visible


def _select(
    q: Tensor, k: Tensor, args: TensorArgs, rows: Tensor | None, heads: Tensor | None
) -> tuple[Tensor, Tensor, TensorArgs]:
    """The same call restricted to some queries and some query heads."""

    def take(t: Tensor | None, dim: int, index: Tensor) -> Tensor | None:
        return t if t is None or t.shape[dim] == 1 else t.index_select(dim, index)

    if heads is not None:
        k = k.index_select(1, heads // max(q.shape[1] // max(k.shape[1], 1), 1))
        q = q.index_select(1, heads)
        args = args._replace(
            bias=take(args.bias, 1, heads),
            sinks=None if args.sinks is None else args.sinks.index_select(0, heads),
            blocks=take(args.blocks, 1, heads),
            alibi=None if args.alibi is None else args.alibi.index_select(1, heads),
        )
    if rows is not None:
        q = q.index_select(2, rows)
        args = args._replace(
            bias=take(args.bias, 2, rows), q_segments=take(args.q_segments, 1, rows)
        )
    return q, k, args


def _grouped(x: Tensor, y: Tensor) -> Tensor:
    """x @ y for x [B, Hq, R, M] and y [B, Hkv, M, N]; heads that share a kv head are its rows."""
    batch, hq, r, m = x.shape
    hkv, n = y.shape[1], y.shape[3]
    rows = hq // max(hkv, 1) * r
    return (x.reshape(batch, hkv, rows, m) @ y).reshape(batch, hq, r, n)


def _scores(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """q_i . k_j [B, Hq, R, Lk], 0 where not visible.

    A product with 0 does not silence NaN or Inf, neither here nor in the derivative (ds @ k), so
    the differentiable product is taken of finite rows only; of the others comes their plain value.
    """
    q_ok, k_ok = q.isfinite().all(-1, keepdim=True), k.isfinite().all(-1, keepdim=True)
    finite = _grouped(torch.where(q_ok, q, 0.0), torch.where(k_ok, k, 0.0).mT)
    plain = _grouped(q.detach(), k.detach().mT)
    ok = q_ok & k_ok.mT.repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1)
    return torch.where(visible, torch.where(ok, finite, plain), 0.0)


def _mix(p: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """sum over visible j of p_ij v_j [B, Hq, R, Dv]; NaN and Inf reach the rows that see them."""
    out = _grouped(p, torch.where(v.isfinite(), v, 0.0))
    seen = visible.to(p.dtype).expand(p.shape)
    up = _grouped(seen, ((v == _INF) | v.isnan()).to(p.dtype)) > 0
    down = _grouped(seen, ((v == -_INF) | v.isnan()).to(p.dtype)) > 0
    spoilt = torch.where(up, _INF, 0.0) + torch.where(down, -_INF, 0.0)  # NaN where both
    # one, but with a derivative: a row that sees a NaN is spoilt in its gradient as well
    total = p.sum(-1, keepdim=True)
    out = out + spoilt.to(p.dtype) * (1.0 + total - total.detach())
    return torch.where(visible.any(-1, keepdim=True), out, 0.0)


def philox(seed: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The 32 random bits of each weight: lane j % 4 of Philox-4x32-10 at counter (j // 4, i, h, b).

    Salmon, Moraes, Dror, Shaw: Parallel random numbers, as easy as 1, 2, 3 (2011).
    seed: int64, one element; b, h, i, j: int64, broadcast; returns int64 in [0, 2^32).
    """
    low = 0xFFFFFFFF

    def multiply(m: int, x: Tensor) -> tuple[Tensor, Tensor]:
        # 32 x 32 -> (high, low) by halves of x, within int64
        t, u = m * (x & 0xFFFF), m * (x >> 16)
        return (u + (t >> 16)) >> 16, (t + ((u & 0xFFFF) << 16)) & low

    seed = seed.reshape(())
    k0, k1 = seed & low, (seed >> 32) & low
    c0, c1, c2, c3 = j // 4, i, h, b
    for _ in range(10):
        high0, low0 = multiply(0xD2511F53, c0)
        high1, low1 = multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    lane = j % 4
    return torch.where(lane < 2, torch.where(lane == 0, c0, c1), torch.where(lane == 2, c2, c3))
