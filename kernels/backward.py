"""Gradients of q, k, v, the dense bias and the sinks, from out, lse and their incoming gradients.

    p_ij  = exp(s_ij - lse_i),   delta_i = dout_i . out_i - dlse_i
    ds_ij = p_ij (dropout(dout_i . v_j) - delta_i)
    dv_j  = sum_i dropout(p_ij) dout_i,   dk_j = scale sum_i ds'_ij q_i,   dq_i = scale sum_j ds'_ij k_j

where ds' is ds times the slope of softcap.  Every sum has one owner and one order, so results are
the same bits in every run: a program per tile of keys for dk and dv, one per tile of queries for dq,
one per tile of the bias for dbias (as FlashAttention-2, Dao 2023, in its deterministic form).

As in the forward pass, a program that ends with NaN or infinity repeats its work with `dot_seen`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attnkit.kernels import host
from attnkit.kernels.parts import (
    INF,
    LOG2E,
    Dense,
    Rows,
    dot,
    dot_seen,
    find_sequence,
    kept,
    key_span,
    live,
    load_tile,
    query_span,
    score,
    sequence,
    visible,
)

# An lse of this size or more is a coarse number: its last digit is worth 2^-11.
COARSE = tl.constexpr(4096.0)


@triton.jit
def _row(rows, seq, h):
    """Pointer to query 0 of the sequence in an array of one number per query."""
    return rows.ptr + (seq.entry.to(tl.int64) * rows.heads + h) * rows.rows + seq.q0


@triton.jit
def _find(mask, sizes, MOST: tl.constexpr, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr,
          heads):  # fmt: skip
    """(batch or packed entry, head, tile, whether there is such a tile) of this program."""
    tile = tl.program_id(0) % sizes.tiles
    head = tl.program_id(0) // sizes.tiles
    h = head % heads
    entry = head // heads
    real = tile >= 0
    if mask.cu_q is not None:
        cu = mask.cu_k if OF_KEYS else mask.cu_q
        entry, tile = find_sequence(cu, mask.sequences, tile, BLOCK, MOST)
        real = entry < mask.sequences
    elif mask.right is not None:
        if not OF_KEYS:
            tile = sizes.tiles - 1 - tile  # the longest rows first
    return entry, h, tile, real


# ------------------------------------------------------------- once per query


@triton.jit
def _row_sum(lse, q, k, mask, how, sinks, seq, h, kv, m0, D: tl.constexpr, BLOCK_D: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr,
             HOW: tl.constexpr):  # fmt: skip
    """log2 of the sum of exp(s - lse) over the keys of each row, which is 0 but for rounding."""
    i = m0 + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    q_head = q.ptr + seq.entry.to(tl.int64) * q.batch + h.to(tl.int64) * q.head
    k_head = k.ptr + seq.entry.to(tl.int64) * k.batch + kv.to(tl.int64) * k.head
    q_tile = load_tile(q, seq.q0 + m0, seq.nq - m0, q_head, tl.arange(0, BLOCK_M),
                       tl.arange(0, BLOCK_D), D, True, D != BLOCK_D)  # fmt: skip
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        total += tl.math.exp2((tl.load(sinks + h) - lse) * LOG2E)
    lo, _, _, hi = key_span(mask, seq, m0, BLOCK_M, BLOCK_N)
    for n0 in tl.range(lo, hi, BLOCK_N):
        j = n0 + columns
        k_tile = load_tile(k, seq.k0 + n0, seq.nk - n0, k_head, columns, tl.arange(0, BLOCK_D), D,
                           True, D != BLOCK_D)  # fmt: skip
        x = dot(q_tile, tl.trans(k_tile), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), HOW)
        x, _ = score(x, how, seq, h, i[:, None], j[None, :], True, FOLD)
        if FOLD:
            x = x * how.scale
        p = tl.math.exp2((x - lse[:, None]) * LOG2E)
        seen = visible(mask, how.bias, seq, h, i[:, None], j[None, :])
        total += tl.sum(tl.where(seen, p, 0.0), 1)
    return tl.where(total > 0.0, tl.math.log2(total), 0.0)


@triton.jit
def rows_kernel(q, k, out, dout, lse, dlse, delta, pivot, low, sinks, mask, how, sizes,
                D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr,
                MOST: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    """delta, pivot (lse; infinity in a row without keys) and low (what a coarse lse lacks).

    All float32 [B, Hq, Lq]; one program per BLOCK_M queries of a head.
    """
    entry, h, tile, real = _find(mask, sizes, MOST, BLOCK_M, False, sizes.q_heads)
    if real:
        seq = sequence(mask, sizes, entry)
        m0 = tile * BLOCK_M
        rows = tl.arange(0, BLOCK_M)
        inside = m0 + rows < seq.nq
        o_head = out.ptr + seq.entry.to(tl.int64) * out.batch + h.to(tl.int64) * out.head
        d_head = dout.ptr + seq.entry.to(tl.int64) * dout.batch + h.to(tl.int64) * dout.head
        left = seq.nq - m0
        columns = tl.arange(0, BLOCK_DV)
        o = load_tile(out, seq.q0 + m0, left, o_head, rows, columns, DV, True, DV != BLOCK_DV)
        do = load_tile(dout, seq.q0 + m0, left, d_head, rows, columns, DV, True, DV != BLOCK_DV)
        total = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        row_lse = tl.load(_row(lse, seq, h) + m0 + rows, mask=inside, other=-INF)
        if dlse is not None:
            total -= tl.load(_row(dlse, seq, h) + m0 + rows, mask=inside, other=0.0)
        dead = row_lse == -INF
        tl.store(_row(delta, seq, h) + m0 + rows, tl.where(dead, 0.0, total), mask=inside)
        tl.store(_row(pivot, seq, h) + m0 + rows, tl.where(dead, INF, row_lse), mask=inside)
        if low is not None:
            coarse = (tl.abs(row_lse) >= COARSE) & (row_lse != -INF)
            lacks = tl.zeros([BLOCK_M], tl.float32)
            if tl.max(coarse.to(tl.int32), 0) > 0:
                lacks = _row_sum(row_lse, q, k, mask, how, sinks, seq, h, h // sizes.group, m0, D,
                                 BLOCK_D, BLOCK_M, BLOCK_N, FOLD, HOW)  # fmt: skip
                lacks = tl.where(coarse, lacks, 0.0)
            tl.store(_row(low, seq, h) + m0 + rows, lacks, mask=inside)


# ------------------------------------------------------------- weights, and their gradient


@triton.jit
def _weight(x, pivot, low, how, FOLD: tl.constexpr):
    """exp(s - lse) of the scores x, with pivot and low of the rows in x's orientation."""
    if FOLD:
        return tl.math.exp2(x * (how.scale * LOG2E) - pivot * LOG2E)
    p = (x - pivot) * LOG2E
    if low is not None:
        p = p - low
    return tl.math.exp2(p)


@triton.jit
def _load_rows(rows, seq, h, m0, other, BLOCK_M: tl.constexpr, EDGE: tl.constexpr):
    at = m0 + tl.arange(0, BLOCK_M)
    if EDGE:
        return tl.load(_row(rows, seq, h) + at, mask=at < seq.nq, other=other)
    return tl.load(_row(rows, seq, h) + at)


@triton.jit
def _dkdv_step(dk, dv, k_tile, v_tile, q, dout, q_head, d_head, delta, pivot, low, mask, how,
               dropout, seq, h, m0, n0, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
               BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
               WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, EDGE: tl.constexpr,
               FOLD: tl.constexpr, CAREFUL: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    """Queries m0 to m0 + BLOCK_M of one head; scores are [BLOCK_N, BLOCK_M] here."""
    rows = tl.arange(0, BLOCK_M)
    i = m0 + rows[None, :]
    j = n0 + tl.arange(0, BLOCK_N)[:, None]
    left = seq.nq - m0
    q_tile = load_tile(q, seq.q0 + m0, left, q_head, rows, tl.arange(0, BLOCK_D), D, EDGE,
                       D != BLOCK_D)  # fmt: skip
    do = load_tile(dout, seq.q0 + m0, left, d_head, rows, tl.arange(0, BLOCK_DV), DV, EDGE,
                   DV != BLOCK_DV)  # fmt: skip
    row_pivot = _load_rows(pivot, seq, h, m0, INF, BLOCK_M, EDGE)[None, :]
    row_low = low
    if low is not None:
        row_low = _load_rows(low, seq, h, m0, 0.0, BLOCK_M, EDGE)[None, :]
    nothing = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    x = dot(k_tile, tl.trans(q_tile), nothing, HOW)
    x, slope = score(x, how, seq, h, i, j, EDGE, FOLD)
    p = _weight(x, row_pivot, row_low, how, FOLD)
    if EDGE:
        seen = visible(mask, how.bias, seq, h, i, j)
        p = tl.where(seen, p, 0.0)
    if dropout is not None:
        stays = tl.trans(kept(dropout, seq, h, m0, n0, BLOCK_M, BLOCK_N))
    if WANT_DV:
        weight = p
        if dropout is not None:
            weight = tl.where(stays, p, 0.0)
        if CAREFUL:
            dv = dot_seen(weight.to(do.dtype), do, dv, seen, HOW)
        else:
            dv = dot(weight.to(do.dtype), do, dv, HOW)
    if WANT_DK:
        dp = dot(v_tile, tl.trans(do), nothing, HOW)
        if dropout is not None:
            dp = tl.where(stays, dp * dropout.grow, 0.0)
        ds = p * (dp - _load_rows(delta, seq, h, m0, 0.0, BLOCK_M, EDGE)[None, :])
        if how.softcap is not None:
            ds = ds * slope
        if EDGE:
            ds = tl.where(seen, ds, 0.0)
        if CAREFUL:
            dk = dot_seen(ds.to(q_tile.dtype), q_tile, dk, seen, HOW)
        else:
            dk = dot(ds.to(q_tile.dtype), q_tile, dk, HOW)
    return dk, dv


@triton.jit
def _dkdv_pass(dk, dv, lo, hi, k_tile, v_tile, q, dout, q_head, d_head, delta, pivot, low, mask,
               how, dropout, seq, h, n0, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
               BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
               WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, EDGE: tl.constexpr,
               FOLD: tl.constexpr, CAREFUL: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    """All queries from lo to hi."""
    for m0 in tl.range(lo, hi, BLOCK_M):
        m0 = tl.multiple_of(m0, BLOCK_M)
        if EDGE and (
            (mask.keep is not None) or (mask.q_segments is not None) or (mask.blocks is not None)
        ):
            if live(mask, seq, h, m0, n0, BLOCK_M, BLOCK_N):
                dk, dv = _dkdv_step(
                    dk, dv, k_tile, v_tile, q, dout, q_head, d_head, delta, pivot, low, mask, how,
                    dropout, seq, h, m0, n0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, WANT_DK,
                    WANT_DV, EDGE, FOLD, CAREFUL, HOW,
                )  # fmt: skip
        else:
            dk, dv = _dkdv_step(
                dk, dv, k_tile, v_tile, q, dout, q_head, d_head, delta, pivot, low, mask, how,
                dropout, seq, h, m0, n0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, WANT_DK,
                WANT_DV, EDGE, FOLD, CAREFUL, HOW,
            )  # fmt: skip
    return dk, dv


@triton.jit
def _dkdv_tile(k_tile, v_tile, q, dout, delta, pivot, low, mask, how, dropout, sizes, seq, kv, n0,
               D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WANT_DK: tl.constexpr,
               WANT_DV: tl.constexpr, FOLD: tl.constexpr, CAREFUL: tl.constexpr,
               HOW: tl.constexpr):  # fmt: skip
    """(dk, dv) of keys n0 to n0 + BLOCK_N, over all query heads of their group."""
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    lo, full_lo, full_hi, hi = query_span(mask, seq, n0, BLOCK_M, BLOCK_N)
    for g in range(0, sizes.group):
        h = kv * sizes.group + g
        q_head = q.ptr + seq.entry.to(tl.int64) * q.batch + h.to(tl.int64) * q.head
        d_head = dout.ptr + seq.entry.to(tl.int64) * dout.batch + h.to(tl.int64) * dout.head
        # the loop without masks first: Triton 3.6 serialises its products otherwise
        dk, dv = _dkdv_pass(
            dk, dv, full_lo, full_hi, k_tile, v_tile, q, dout, q_head, d_head, delta, pivot, low,
            mask, how, dropout, seq, h, n0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, WANT_DK,
            WANT_DV, CAREFUL, FOLD, CAREFUL, HOW,
        )  # fmt: skip
        if mask.right is not None:
            dk, dv = _dkdv_pass(
                dk, dv, lo, full_lo, k_tile, v_tile, q, dout, q_head, d_head, delta, pivot, low,
                mask, how, dropout, seq, h, n0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, WANT_DK,
                WANT_DV, True, FOLD, CAREFUL, HOW,
            )  # fmt: skip
        dk, dv = _dkdv_pass(
            dk, dv, full_hi, hi, k_tile, v_tile, q, dout, q_head, d_head, delta, pivot, low, mask,
            how, dropout, seq, h, n0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, WANT_DK, WANT_DV,
            True, FOLD, CAREFUL, HOW,
        )  # fmt: skip
    return dk, dv


@triton.jit
def _store_tile(tile, array, seq_row, limit, entry, head, DIM: tl.constexpr, BLOCK: tl.constexpr,
                ROWS: tl.constexpr):  # fmt: skip
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    base = array.ptr + entry.to(tl.int64) * array.batch + head.to(tl.int64) * array.head
    at = base + (seq_row + rows).to(tl.int64)[:, None] * array.row + columns[None, :]
    there = (rows[:, None] < limit) & (columns[None, :] < DIM)
    tl.store(at, tile.to(array.ptr.dtype.element_ty), mask=there)


@triton.jit
def _store_dkdv(dk, dv, dk_out, dv_out, how, dropout, seq, rows_left, kv, n0, D: tl.constexpr,
                DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                BLOCK_N: tl.constexpr):  # fmt: skip
    if dk_out is not None:
        _store_tile(dk * how.scale, dk_out, seq.k0 + n0, rows_left, seq.entry, kv, D, BLOCK_D,
                    BLOCK_N)  # fmt: skip
    if dv_out is not None:
        if dropout is not None:
            dv = dv * dropout.grow
        _store_tile(dv, dv_out, seq.k0 + n0, rows_left, seq.entry, kv, DV, BLOCK_DV, BLOCK_N)


@triton.jit
def dkdv_kernel(q, k, v, dout, delta, pivot, low, dk_out, dv_out, mask, how, dropout, sizes,
                kv_heads, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
                BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                FOLD: tl.constexpr, MASKED: tl.constexpr, MOST: tl.constexpr,
                HOW: tl.constexpr):  # fmt: skip
    """dk and dv, each None where not wanted.  One program per BLOCK_N keys of a head of keys."""
    entry, kv, tile, real = _find(mask, sizes, MOST, BLOCK_N, True, kv_heads)
    if real:
        seq = sequence(mask, sizes, entry)
        n0 = tile * BLOCK_N
        rows_left = sizes.lk - n0  # keys past `lengths` have a gradient, 0
        if mask.cu_k is not None:
            rows_left = tl.load(mask.cu_k + entry + 1) - seq.k0 - n0
        columns = tl.arange(0, BLOCK_N)
        k_head = k.ptr + seq.entry.to(tl.int64) * k.batch + kv.to(tl.int64) * k.head
        v_head = v.ptr + seq.entry.to(tl.int64) * v.batch + kv.to(tl.int64) * v.head
        left = seq.nk - n0
        k_tile = load_tile(k, seq.k0 + n0, left, k_head, columns, tl.arange(0, BLOCK_D), D, True,
                           D != BLOCK_D)  # fmt: skip
        v_tile = load_tile(v, seq.k0 + n0, left, v_head, columns, tl.arange(0, BLOCK_DV), DV, True,
                           DV != BLOCK_DV)  # fmt: skip
        want_dk: tl.constexpr = dk_out is not None
        want_dv: tl.constexpr = dv_out is not None
        dk, dv = _dkdv_tile(
            k_tile, v_tile, q, dout, delta, pivot, low, mask, how, dropout, sizes, seq, kv, n0, D,
            DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, want_dk, want_dv, FOLD, False, HOW,
        )  # fmt: skip
        _store_dkdv(dk, dv, dk_out, dv_out, how, dropout, seq, rows_left, kv, n0, D, DV, BLOCK_D,
                    BLOCK_DV, BLOCK_N)  # fmt: skip
        if MASKED:
            wrong = tl.max(tl.where(tl.abs(dk) < INF, 0, 1), 1)
            wrong = wrong | tl.max(tl.where(tl.abs(dv) < INF, 0, 1), 1)
            if tl.max(wrong, 0) > 0:
                dk, dv = _dkdv_tile(
                    k_tile, v_tile, q, dout, delta, pivot, low, mask, how, dropout, sizes, seq, kv,
                    n0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, want_dk, want_dv, FOLD, True,
                    HOW,
                )  # fmt: skip
                _store_dkdv(dk, dv, dk_out, dv_out, how, dropout, seq, rows_left, kv, n0, D, DV,
                            BLOCK_D, BLOCK_DV, BLOCK_N)  # fmt: skip


# ------------------------------------------------------------- queries and bias


@triton.jit
def _ds(q_tile, do, k_tile, v_tile, row_delta, row_pivot, row_low, mask, how, dropout, seq, h, m0,
        n0, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EDGE: tl.constexpr, FOLD: tl.constexpr,
        HOW: tl.constexpr):  # fmt: skip
    """(ds, slope of softcap, seen) of one tile [BLOCK_M, BLOCK_N]; seen is None without EDGE."""
    i = m0 + tl.arange(0, BLOCK_M)[:, None]
    j = n0 + tl.arange(0, BLOCK_N)[None, :]
    nothing = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    x = dot(q_tile, tl.trans(k_tile), nothing, HOW)
    x, slope = score(x, how, seq, h, i, j, EDGE, FOLD)
    low = row_low
    if row_low is not None:
        low = row_low[:, None]
    p = _weight(x, row_pivot[:, None], low, how, FOLD)
    dp = dot(do, tl.trans(v_tile), nothing, HOW)
    if dropout is not None:
        stays = kept(dropout, seq, h, m0, n0, BLOCK_M, BLOCK_N)
        dp = tl.where(stays, dp * dropout.grow, 0.0)
    ds = p * (dp - row_delta[:, None])
    seen = None
    if EDGE:
        seen = visible(mask, how.bias, seq, h, i, j)
        ds = tl.where(seen, ds, 0.0)
    return ds, slope, seen


@triton.jit
def _dq_step(dq, q_tile, do, row_delta, row_pivot, row_low, k, v, k_head, v_head, mask, how,
             dropout, seq, h, m0, n0, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
             BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             EDGE: tl.constexpr, FOLD: tl.constexpr, CAREFUL: tl.constexpr,
             HOW: tl.constexpr):  # fmt: skip
    """Keys n0 to n0 + BLOCK_N."""
    columns = tl.arange(0, BLOCK_N)
    left = seq.nk - n0
    k_tile = load_tile(k, seq.k0 + n0, left, k_head, columns, tl.arange(0, BLOCK_D), D, EDGE,
                       D != BLOCK_D)  # fmt: skip
    v_tile = load_tile(v, seq.k0 + n0, left, v_head, columns, tl.arange(0, BLOCK_DV), DV, EDGE,
                       DV != BLOCK_DV)  # fmt: skip
    ds, slope, seen = _ds(q_tile, do, k_tile, v_tile, row_delta, row_pivot, row_low, mask, how,
                          dropout, seq, h, m0, n0, BLOCK_M, BLOCK_N, EDGE, FOLD, HOW)  # fmt: skip
    if how.softcap is not None:
        ds = ds * slope
        if EDGE:
            ds = tl.where(seen, ds, 0.0)  # the slope at a hidden NaN is NaN
    if CAREFUL:
        return dot_seen(ds.to(k_tile.dtype), k_tile, dq, seen, HOW)
    return dot(ds.to(k_tile.dtype), k_tile, dq, HOW)


@triton.jit
def _dq_pass(dq, lo, hi, q_tile, do, row_delta, row_pivot, row_low, k, v, k_head, v_head, mask, how,
             dropout, seq, h, m0, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
             BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             EDGE: tl.constexpr, FOLD: tl.constexpr, CAREFUL: tl.constexpr,
             HOW: tl.constexpr):  # fmt: skip
    """All keys from lo to hi."""
    for n0 in tl.range(lo, hi, BLOCK_N):
        n0 = tl.multiple_of(n0, BLOCK_N)
        if EDGE and (
            (mask.keep is not None) or (mask.q_segments is not None) or (mask.blocks is not None)
        ):
            if live(mask, seq, h, m0, n0, BLOCK_M, BLOCK_N):
                dq = _dq_step(
                    dq, q_tile, do, row_delta, row_pivot, row_low, k, v, k_head, v_head, mask, how,
                    dropout, seq, h, m0, n0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, EDGE, FOLD,
                    CAREFUL, HOW,
                )  # fmt: skip
        else:
            dq = _dq_step(
                dq, q_tile, do, row_delta, row_pivot, row_low, k, v, k_head, v_head, mask, how,
                dropout, seq, h, m0, n0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, EDGE, FOLD,
                CAREFUL, HOW,
            )  # fmt: skip
    return dq


@triton.jit
def dq_kernel(q, k, v, dout, delta, pivot, low, dq_out, mask, how, dropout, sizes,
              D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr,
              MASKED: tl.constexpr, MOST: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    """dq.  One program per BLOCK_M queries of a head."""
    entry, h, tile, real = _find(mask, sizes, MOST, BLOCK_M, False, sizes.q_heads)
    if real:
        seq = sequence(mask, sizes, entry)
        m0 = tile * BLOCK_M
        kv = h // sizes.group
        rows = tl.arange(0, BLOCK_M)
        left = seq.nq - m0
        q_head = q.ptr + seq.entry.to(tl.int64) * q.batch + h.to(tl.int64) * q.head
        d_head = dout.ptr + seq.entry.to(tl.int64) * dout.batch + h.to(tl.int64) * dout.head
        k_head = k.ptr + seq.entry.to(tl.int64) * k.batch + kv.to(tl.int64) * k.head
        v_head = v.ptr + seq.entry.to(tl.int64) * v.batch + kv.to(tl.int64) * v.head
        q_tile = load_tile(q, seq.q0 + m0, left, q_head, rows, tl.arange(0, BLOCK_D), D, True,
                           D != BLOCK_D)  # fmt: skip
        do = load_tile(dout, seq.q0 + m0, left, d_head, rows, tl.arange(0, BLOCK_DV), DV, True,
                       DV != BLOCK_DV)  # fmt: skip
        row_delta = _load_rows(delta, seq, h, m0, 0.0, BLOCK_M, True)
        row_pivot = _load_rows(pivot, seq, h, m0, INF, BLOCK_M, True)
        row_low = low
        if low is not None:
            row_low = _load_rows(low, seq, h, m0, 0.0, BLOCK_M, True)
        lo, full_lo, full_hi, hi = key_span(mask, seq, m0, BLOCK_M, BLOCK_N)
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if (mask.left is not None) or (mask.keep is not None):
            dq = _dq_pass(
                dq, lo, full_lo, q_tile, do, row_delta, row_pivot, row_low, k, v, k_head, v_head,
                mask, how, dropout, seq, h, m0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, True,
                FOLD, False, HOW,
            )  # fmt: skip
        dq = _dq_pass(
            dq, full_lo, full_hi, q_tile, do, row_delta, row_pivot, row_low, k, v, k_head, v_head,
            mask, how, dropout, seq, h, m0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, False, FOLD,
            False, HOW,
        )  # fmt: skip
        dq = _dq_pass(
            dq, full_hi, hi, q_tile, do, row_delta, row_pivot, row_low, k, v, k_head, v_head, mask,
            how, dropout, seq, h, m0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, True, FOLD, False,
            HOW,
        )  # fmt: skip
        _store_tile(dq * how.scale, dq_out, seq.q0 + m0, left, seq.entry, h, D, BLOCK_D, BLOCK_M)
        if MASKED:
            wrong = tl.max(tl.where(tl.abs(dq) < INF, 0, 1), 1)
            if tl.max(wrong, 0) > 0:
                dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                dq = _dq_pass(
                    dq, lo, hi, q_tile, do, row_delta, row_pivot, row_low, k, v, k_head, v_head,
                    mask, how, dropout, seq, h, m0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
                    True, FOLD, True, HOW,
                )  # fmt: skip
                _store_tile(dq * how.scale, dq_out, seq.q0 + m0, left, seq.entry, h, D, BLOCK_D,
                            BLOCK_M)  # fmt: skip


@triton.jit
def dbias_kernel(q, k, v, dout, delta, pivot, low, part, mask, how, dropout, sizes, batches, heads,
                 steps_b, steps_h, tiles_n, D: tl.constexpr, DV: tl.constexpr,
                 BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_N: tl.constexpr, FOLD: tl.constexpr, SUM_Q: tl.constexpr,
                 SUM_K: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    """part: float32 [batches, heads, rows, columns], the gradient of the bias.

    It is summed over the batches (steps_b of them) and heads along which the bias was broadcast.
    SUM_Q, SUM_K: rows (columns) are those of tiles, each the sum over the queries (keys) in it.
    """
    n0 = (tl.program_id(0) % tiles_n) * BLOCK_N
    rest = tl.program_id(0) // tiles_n
    m0 = (rest % sizes.tiles) * BLOCK_M
    rest = rest // sizes.tiles
    head = rest % heads
    batch = rest // heads
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for b in range(0, steps_b):
        seq = sequence(mask, sizes, batch + b)
        lo, _, _, hi = key_span(mask, seq, m0, BLOCK_M, BLOCK_N)
        for g in range(0, steps_h):
            h = head + g
            kv = h // sizes.group
            if (n0 >= lo) & (n0 < hi) & live(mask, seq, h, m0, n0, BLOCK_M, BLOCK_N):
                q_head = q.ptr + seq.entry.to(tl.int64) * q.batch + h.to(tl.int64) * q.head
                d_head = dout.ptr + seq.entry.to(tl.int64) * dout.batch + h.to(tl.int64) * dout.head
                k_head = k.ptr + seq.entry.to(tl.int64) * k.batch + kv.to(tl.int64) * k.head
                v_head = v.ptr + seq.entry.to(tl.int64) * v.batch + kv.to(tl.int64) * v.head
                across = tl.arange(0, BLOCK_D)
                across_v = tl.arange(0, BLOCK_DV)
                left = seq.nq - m0
                q_tile = load_tile(q, m0, left, q_head, rows, across, D, True, D != BLOCK_D)
                do = load_tile(dout, m0, left, d_head, rows, across_v, DV, True, DV != BLOCK_DV)
                left = seq.nk - n0
                k_tile = load_tile(k, n0, left, k_head, columns, across, D, True, D != BLOCK_D)
                v_tile = load_tile(v, n0, left, v_head, columns, across_v, DV, True,
                                   DV != BLOCK_DV)  # fmt: skip
                row_delta = _load_rows(delta, seq, h, m0, 0.0, BLOCK_M, True)
                row_pivot = _load_rows(pivot, seq, h, m0, INF, BLOCK_M, True)
                row_low = _load_rows(low, seq, h, m0, 0.0, BLOCK_M, True)
                ds, _, _ = _ds(q_tile, do, k_tile, v_tile, row_delta, row_pivot, row_low, mask, how,
                               dropout, seq, h, m0, n0, BLOCK_M, BLOCK_N, True, FOLD,
                               HOW)  # fmt: skip
                total += ds
    base = part.ptr + batch.to(tl.int64) * part.batch + head.to(tl.int64) * part.head
    i = m0 + rows
    j = n0 + columns
    if SUM_Q and SUM_K:
        at = base + (m0 // BLOCK_M) * part.row + (n0 // BLOCK_N) * part.column
        tl.store(at, tl.sum(tl.sum(total, 1), 0))
    elif SUM_Q:
        at = base + (m0 // BLOCK_M).to(tl.int64) * part.row + j * part.column
        tl.store(at, tl.sum(total, 0), mask=j < sizes.lk)
    elif SUM_K:
        at = base + i.to(tl.int64) * part.row + (n0 // BLOCK_N) * part.column
        tl.store(at, tl.sum(total, 1), mask=i < sizes.lq)
    else:
        at = base + i.to(tl.int64)[:, None] * part.row + j[None, :] * part.column
        tl.store(at, total, mask=(i[:, None] < sizes.lq) & (j[None, :] < sizes.lk))


# ------------------------------------------------------------- the host's side


def backward(dout, dlse, q, k, v, out, lse, args, spec, needs):
    """(dq, dk, dv, dbias, dsinks): gradients in the dtype of their tensors, empty if not needed.

    dbias has size 1 where the bias was broadcast (stride 0); dsinks is float32 [Hq].
    """
    want_dq, want_dk, want_dv, want_dbias, want_dsinks = needs
    call = host.Call(q, k, v, args, spec)
    none = [q.new_empty(0) for _ in range(5)]
    if not any(needs):
        return tuple(none)
    dq = host.empty_like(q, q.shape[3]) if want_dq else None
    dk = host.empty_like(k, k.shape[3]) if want_dk else None
    dv = host.empty_like(v, v.shape[3]) if want_dv else None
    if args.cu_seqlens_q is not None:  # rows may belong to no sequence
        for t in (dq, dk, dv):
            if t is not None:
                t.zero_()
    delta, pivot, low = _rows(call, dout, dlse, out, lse)
    common = {
        "q": call.q,
        "k": call.k,
        "v": call.v,
        "dout": host.array(host.laid_out(dout)),
        "delta": _wrapped(delta),
        "pivot": _wrapped(pivot),
        "low": None if low is None else _wrapped(low),
        "mask": call.mask,
        "how": call.score,
        "dropout": call.dropout,
        "FOLD": call.fold,
    }
    if dk is not None or dv is not None:
        _dkdv(call, common, dk, dv)
    if dq is not None and dq.numel():
        config = call.config("dq")
        tiles, grid = call.query_grid(config.block_m)
        dq_kernel[grid](
            **common, dq_out=host.array(dq), sizes=call.sizes(tiles), MASKED=call.masked,
            **call.constants(config), **config.options(),
        )  # fmt: skip
    dbias = _dbias(call, common) if want_dbias else None
    dsinks = _dsinks(args.sinks, lse, delta, pivot) if want_dsinks else None
    found = (dq, dk, dv, dbias, dsinks)
    return tuple(n if t is None else t for t, n in zip(found, none, strict=True))


def _wrapped(t: torch.Tensor) -> Rows:
    return Rows(t, t.shape[1], t.shape[2])


def _rows(call, dout, dlse, out, lse):
    """delta, pivot and low (None without a float bias) of each query."""
    delta, pivot = torch.zeros_like(lse), torch.full_like(lse, float("inf"))
    low = torch.zeros_like(lse) if call.float_bias else None
    if lse.numel() == 0:
        return delta, pivot, low
    config = call.config("dq")
    tiles, grid = call.query_grid(config.block_m)
    rows_kernel[grid](
        q=call.q, k=call.k, out=host.array(host.laid_out(out)),
        dout=host.array(host.laid_out(dout)), lse=_wrapped(lse.contiguous()),
        dlse=None if dlse is None else _wrapped(dlse.contiguous()), delta=_wrapped(delta),
        pivot=_wrapped(pivot), low=None if low is None else _wrapped(low), sinks=call.args.sinks,
        mask=call.mask, how=call.score, sizes=call.sizes(tiles), FOLD=call.fold,
        **call.constants(config), **config.options(),
    )  # fmt: skip
    return delta, pivot, low


def _dkdv(call, common, dk, dv) -> None:
    some = [t for t in (dk, dv) if t is not None and t.numel()]
    if not some:
        return
    config = call.config("dkdv")
    tiles, grid = call.key_grid(config.block_n)
    dkdv_kernel[grid](
        **common, dk_out=None if dk is None else host.array(dk),
        dv_out=None if dv is None else host.array(dv), sizes=call.sizes(tiles),
        kv_heads=call.kv_heads, MASKED=call.masked, **call.constants(config), **config.options(),
    )  # fmt: skip


def _dbias(call, common) -> torch.Tensor:
    bias = call.args.bias
    one = [bias.stride(d) == 0 or bias.shape[d] == 1 for d in range(4)]
    final = [1 if bias.stride(d) == 0 else bias.shape[d] for d in range(4)]
    if 0 in bias.shape:
        return bias.new_zeros(final)
    config = call.config("dq")
    tiles_m = triton.cdiv(call.lq, config.block_m)
    tiles_n = triton.cdiv(call.lk, config.block_n)
    batches, heads = (1 if one[d] else bias.shape[d] for d in range(2))
    rows, columns = tiles_m if one[2] else call.lq, tiles_n if one[3] else call.lk
    part = bias.new_empty((batches, heads, rows, columns), dtype=torch.float32)
    constants = call.constants(config)
    del constants["MOST"]
    dbias_kernel[(tiles_m * tiles_n * heads * batches,)](
        **common, part=Dense(part, *part.stride()), sizes=call.sizes(tiles_m), batches=batches,
        heads=heads, steps_b=call.batch if one[0] else 1, steps_h=call.q_heads if one[1] else 1,
        tiles_n=tiles_n, SUM_Q=one[2], SUM_K=one[3], **constants, **config.options(),
    )  # fmt: skip
    return part.sum_to_size(final).to(bias.dtype)


def _dsinks(sinks, lse, delta, pivot) -> torch.Tensor:
    """Minus the sum of p_sink * delta: a sink has a weight but no value."""
    weight = torch.exp(sinks[:, None] - pivot)
    return -(weight * delta).sum((0, 2))
