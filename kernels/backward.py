"""Gradients of q, k, v, the dense bias and the sinks, from out, lse and their incoming gradients.

    p_ij  = exp(s_ij - lse_i),   delta_i = dout_i . out_i - dlse_i
    ds_ij = p_ij (dropout(dout_i . v_j) - delta_i)
    dv_j  = sum_i dropout(p_ij) dout_i
    dk_j  = scale sum_i ds'_ij q_i,   dq_i = scale sum_j ds'_ij k_j

where ds' is ds times the slope of softcap.  Every sum has one owner and one order, so results are
the same bits in every run: a program per tile of keys for dk and dv, one per tile of queries for
dq, one per tile of the bias for dbias (as FlashAttention-2, Dao 2023, in its deterministic form).

A product with weight 0 does not silence NaN and infinity.  A program that ends with one of them
marks its tile, which a second kernel then computes again with `dot_seen`; it does nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl
from attnkit.kernels.parts import (
    INF,
    LOG2E,
    dot,
    dot_rounded,
    dot_seen,
    find_tile,
    kept,
    key_span,
    live,
    load_tile,
    narrow,
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
    lo, _full_lo, _full_hi, hi = key_span(mask, seq, m0, BLOCK_M, BLOCK_N)
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
    entry, h, tile, real = find_tile(mask, sizes, MOST, BLOCK_M, False, sizes.q_heads)
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
def _dkdv_weigh(k_tile, v_tile, q_tile, do, delta, pivot, low, mask, how, dropout, seq, h, m0, n0,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WANT_DK: tl.constexpr,
                EDGE: tl.constexpr, FOLD: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    """(weights, ds' where WANT_DK, seen) of one tile, each [BLOCK_N, BLOCK_M]."""
    i = m0 + tl.arange(0, BLOCK_M)[None, :]
    j = n0 + tl.arange(0, BLOCK_N)[:, None]
    row_pivot = _load_rows(pivot, seq, h, m0, INF, BLOCK_M, EDGE)[None, :]
    row_low = low
    if low is not None:
        row_low = _load_rows(low, seq, h, m0, 0.0, BLOCK_M, EDGE)[None, :]
    nothing = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    x = dot(k_tile, tl.trans(q_tile), nothing, HOW)
    x, slope = score(x, how, seq, h, i, j, EDGE, FOLD)
    p = _weight(x, row_pivot, row_low, how, FOLD)
    seen = nothing == 0.0
    if EDGE:
        seen = visible(mask, how.bias, seq, h, i, j)
        p = tl.where(seen, p, 0.0)
    weight = p
    if dropout is not None:
        stays = tl.trans(kept(dropout, seq, h, m0, n0, BLOCK_M, BLOCK_N))
        weight = tl.where(stays, p, 0.0)
    ds = nothing
    if WANT_DK:
        dp = dot(v_tile, tl.trans(do), nothing, HOW)
        if dropout is not None:
            dp = tl.where(stays, dp * dropout.grow, 0.0)
        ds = p * (dp - _load_rows(delta, seq, h, m0, 0.0, BLOCK_M, EDGE)[None, :])
        if how.softcap is not None:
            ds = ds * slope
        if EDGE:
            ds = tl.where(seen, ds, 0.0)
    return weight, ds, seen


@triton.jit
def _load_queries(q, dout, desc, q_head, d_head, seq, h, m0, D: tl.constexpr,
                  DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                  BLOCK_M: tl.constexpr, EDGE: tl.constexpr):  # fmt: skip
    """q and dout of queries m0 to m0 + BLOCK_M."""
    if desc is not None:
        q_tile = desc[0].load([seq.entry, h, m0, 0]).reshape(BLOCK_M, BLOCK_D)
        return q_tile, desc[1].load([seq.entry, h, m0, 0]).reshape(BLOCK_M, BLOCK_DV)
    rows = tl.arange(0, BLOCK_M)
    left = seq.nq - m0
    q_tile = load_tile(q, seq.q0 + m0, left, q_head, rows, tl.arange(0, BLOCK_D), D, EDGE,
                       D != BLOCK_D)  # fmt: skip
    do = load_tile(dout, seq.q0 + m0, left, d_head, rows, tl.arange(0, BLOCK_DV), DV, EDGE,
                   DV != BLOCK_DV)  # fmt: skip
    return q_tile, do


@triton.jit
def _dkdv_step(dk, dv, k_tile, v_tile, q, dout, desc, q_head, d_head, delta, pivot, low,
               mask, how, dropout, seq, h, m0, n0, D: tl.constexpr, DV: tl.constexpr,
               BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
               BLOCK_N: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
               EDGE: tl.constexpr, FOLD: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    """Queries m0 to m0 + BLOCK_M of one head."""
    q_tile, do = _load_queries(
        q, dout, desc, q_head, d_head, seq, h, m0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, EDGE
    )
    weight, ds, _seen = _dkdv_weigh(
        k_tile, v_tile, q_tile, do, delta, pivot, low, mask, how, dropout, seq, h, m0, n0, BLOCK_M,
        BLOCK_N, WANT_DK, EDGE, FOLD, HOW,
    )  # fmt: skip
    if WANT_DV:
        dv = dot_rounded(weight, do, dv, BLOCK_DV, HOW)
    if WANT_DK:
        dk = dot_rounded(ds, q_tile, dk, BLOCK_D, HOW)
    return dk, dv


@triton.jit
def _dkdv_pass(dk, dv, lo, hi, k_tile, v_tile, q, dout, desc, q_head, d_head, delta,
               pivot, low, mask, how, dropout, seq, h, n0, D: tl.constexpr, DV: tl.constexpr,
               BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
               BLOCK_N: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
               EDGE: tl.constexpr, FOLD: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    """All queries from lo to hi."""
    for m0 in tl.range(lo, hi, BLOCK_M):
        m0 = tl.multiple_of(m0, BLOCK_M)
        if EDGE and (
            (mask.keep is not None) or (mask.q_segments is not None) or (mask.blocks is not None)
        ):
            if live(mask, seq, h, m0, n0, BLOCK_M, BLOCK_N):
                dk, dv = _dkdv_step(
                    dk, dv, k_tile, v_tile, q, dout, desc, q_head, d_head, delta, pivot, low, mask,
                    how, dropout, seq, h, m0, n0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
                    WANT_DK, WANT_DV, EDGE, FOLD, HOW,
                )  # fmt: skip
        else:
            dk, dv = _dkdv_step(
                dk, dv, k_tile, v_tile, q, dout, desc, q_head, d_head, delta, pivot, low, mask, how,
                dropout, seq, h, m0, n0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, WANT_DK,
                WANT_DV, EDGE, FOLD, HOW,
            )  # fmt: skip
    return dk, dv


@triton.jit
def _load_keys(k, v, seq, kv, n0, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
               BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """k and v of keys n0 to n0 + BLOCK_N."""
    columns = tl.arange(0, BLOCK_N)
    k_head = k.ptr + seq.entry.to(tl.int64) * k.batch + kv.to(tl.int64) * k.head
    v_head = v.ptr + seq.entry.to(tl.int64) * v.batch + kv.to(tl.int64) * v.head
    left = seq.nk - n0
    k_tile = load_tile(k, seq.k0 + n0, left, k_head, columns, tl.arange(0, BLOCK_D), D, True,
                       D != BLOCK_D)  # fmt: skip
    v_tile = load_tile(v, seq.k0 + n0, left, v_head, columns, tl.arange(0, BLOCK_DV), DV, True,
                       DV != BLOCK_DV)  # fmt: skip
    return k_tile, v_tile


@triton.jit
def _store_tile(tile, array, seq_row, limit, entry, head, c, DIM: tl.constexpr, BLOCK: tl.constexpr,
                ROWS: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    rows = tl.arange(0, ROWS)
    columns = c + tl.arange(0, BLOCK)
    base = array.ptr + entry.to(tl.int64) * array.batch + head.to(tl.int64) * array.head
    at = base + (seq_row + rows).to(tl.int64)[:, None] * array.row + columns[None, :]
    there = (rows[:, None] < limit) & (columns[None, :] < DIM)
    tl.store(at, narrow(tile, array.ptr.dtype.element_ty, HOW), mask=there)


@triton.jit
def _store_dkdv(dk, dv, dk_out, dv_out, how, dropout, seq, rows_left, kv, n0, c, D: tl.constexpr,
                DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                BLOCK_N: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    if dk_out is not None:
        _store_tile(dk * how.scale, dk_out, seq.k0 + n0, rows_left, seq.entry, kv, c, D,
                    BLOCK_D, BLOCK_N, HOW)  # fmt: skip
    if dv_out is not None:
        if dropout is not None:
            dv = dv * dropout.grow
        _store_tile(dv, dv_out, seq.k0 + n0, rows_left, seq.entry, kv, c, DV, BLOCK_DV,
                    BLOCK_N, HOW)  # fmt: skip


@triton.jit
def dkdv_kernel(q, k, v, dout, desc, delta, pivot, low, spoilt, dk_out, dv_out, mask, how, dropout,
                sizes, kv_heads, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
                BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                FOLD: tl.constexpr, MOST: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    """dk and dv, each None where not wanted.  One program per BLOCK_N keys of a head of keys.

    desc: TMA descriptors of q and dout, or None.
    spoilt: int32, one per program: whether it ended with NaN or infinity; None: nobody asks.
    """
    entry, kv, tile, real = find_tile(mask, sizes, MOST, BLOCK_N, True, kv_heads)
    if real:
        seq = sequence(mask, sizes, entry)
        n0 = tile * BLOCK_N
        rows_left = sizes.lk - n0  # keys past `lengths` have a gradient, 0
        if mask.cu_k is not None:
            rows_left = tl.load(mask.cu_k + entry + 1) - seq.k0 - n0
        k_tile, v_tile = _load_keys(k, v, seq, kv, n0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N)
        want_dk: tl.constexpr = dk_out is not None
        want_dv: tl.constexpr = dv_out is not None
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        lo, full_lo, full_hi, hi = query_span(mask, seq, n0, BLOCK_M, BLOCK_N)
        for g in range(sizes.group):
            h = kv * sizes.group + g
            q_head = q.ptr + seq.entry.to(tl.int64) * q.batch + h.to(tl.int64) * q.head
            d_head = dout.ptr + seq.entry.to(tl.int64) * dout.batch + h.to(tl.int64) * dout.head
            # the loop without masks first, as in `dq_kernel`
            dk, dv = _dkdv_pass(
                dk, dv, full_lo, full_hi, k_tile, v_tile, q, dout, desc, q_head, d_head, delta,
                pivot, low, mask, how, dropout, seq, h, n0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M,
                BLOCK_N, want_dk, want_dv, False, FOLD, HOW,
            )  # fmt: skip
            if mask.right is not None:
                dk, dv = _dkdv_pass(
                    dk, dv, lo, full_lo, k_tile, v_tile, q, dout, desc, q_head, d_head, delta,
                    pivot, low, mask, how, dropout, seq, h, n0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M,
                    BLOCK_N, want_dk, want_dv, True, FOLD, HOW,
                )  # fmt: skip
            dk, dv = _dkdv_pass(
                dk, dv, full_hi, hi, k_tile, v_tile, q, dout, desc, q_head, d_head, delta, pivot,
                low, mask, how, dropout, seq, h, n0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
                want_dk, want_dv, True, FOLD, HOW,
            )  # fmt: skip
        _store_dkdv(dk, dv, dk_out, dv_out, how, dropout, seq, rows_left, kv, n0, 0, D, DV, BLOCK_D,
                    BLOCK_DV, BLOCK_N, HOW)  # fmt: skip
        if spoilt is not None:
            wrong = tl.max(tl.where(tl.abs(dk) < INF, 0, 1), 1)
            wrong = wrong | tl.max(tl.where(tl.abs(dv) < INF, 0, 1), 1)
            tl.store(spoilt + tl.program_id(0), tl.max(wrong, 0))


@triton.jit
def dkdv_again_kernel(q, k, v, dout, delta, pivot, low, spoilt, dk_out, dv_out, mask, how, dropout,
                      sizes, kv_heads, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
                      BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                      FOLD: tl.constexpr, MOST: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    """dk and dv of the tiles that are marked, with `dot_seen`, a few columns at a time."""
    widest: tl.constexpr = BLOCK_D if BLOCK_D > BLOCK_DV else BLOCK_DV
    width: tl.constexpr = 32 if widest > 32 else widest
    entry, kv, tile, real = find_tile(mask, sizes, MOST, BLOCK_N, True, kv_heads)
    if real & (tl.load(spoilt + tl.program_id(0), mask=real, other=0) != 0):
        seq = sequence(mask, sizes, entry)
        n0 = tile * BLOCK_N
        rows_left = sizes.lk - n0
        if mask.cu_k is not None:
            rows_left = tl.load(mask.cu_k + entry + 1) - seq.k0 - n0
        k_tile, v_tile = _load_keys(k, v, seq, kv, n0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N)
        lo, full_lo, full_hi, hi = query_span(mask, seq, n0, BLOCK_M, BLOCK_N)
        for c in range(0, widest, width):
            columns = c + tl.arange(0, width)
            dk = tl.zeros([BLOCK_N, width], tl.float32)
            dv = tl.zeros([BLOCK_N, width], tl.float32)
            for g in range(sizes.group):
                h = kv * sizes.group + g
                q_head = q.ptr + seq.entry.to(tl.int64) * q.batch + h.to(tl.int64) * q.head
                d_head = dout.ptr + seq.entry.to(tl.int64) * dout.batch + h.to(tl.int64) * dout.head
                for part in range(3):  # in the order of `dkdv_kernel`, for the same bits
                    start = tl.where(part == 0, full_lo, tl.where(part == 1, lo, full_hi))
                    end = tl.where(part == 0, full_hi, tl.where(part == 1, full_lo, hi))
                    for m0 in tl.range(start, end, BLOCK_M, num_stages=1):
                        if live(mask, seq, h, m0, n0, BLOCK_M, BLOCK_N):
                            q_tile, do = _load_queries(q, dout, None, q_head, d_head, seq, h, m0,
                                                       D, DV, BLOCK_D, BLOCK_DV, BLOCK_M,
                                                       True)  # fmt: skip
                            weight, ds, seen = _dkdv_weigh(
                                k_tile, v_tile, q_tile, do, delta, pivot, low, mask, how, dropout,
                                seq, h, m0, n0, BLOCK_M, BLOCK_N, dk_out is not None, True, FOLD,
                                HOW,
                            )  # fmt: skip
                            rows = tl.arange(0, BLOCK_M)
                            left = seq.nq - m0
                            if dv_out is not None:
                                do_part = load_tile(dout, seq.q0 + m0, left, d_head, rows, columns,
                                                    DV, True, True)  # fmt: skip
                                dv = dot_seen(weight, do_part, dv, seen, BLOCK_DV, HOW)
                            if dk_out is not None:
                                q_part = load_tile(q, seq.q0 + m0, left, q_head, rows, columns, D,
                                                   True, True)  # fmt: skip
                                dk = dot_seen(ds, q_part, dk, seen, BLOCK_D, HOW)
            _store_dkdv(dk, dv, dk_out, dv_out, how, dropout, seq, rows_left, kv, n0, c, D, DV,
                        width, width, BLOCK_N, HOW)  # fmt: skip


# ------------------------------------------------------------- queries and bias


@triton.jit
def _ds(q_tile, do, k_tile, v_tile, row_delta, row_pivot, row_low, mask, how, dropout, seq, h, m0,
        n0, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EDGE: tl.constexpr, FOLD: tl.constexpr,
        HOW: tl.constexpr):  # fmt: skip
    """(ds, ds', seen) of one tile, each [BLOCK_M, BLOCK_N]."""
    i = m0 + tl.arange(0, BLOCK_M)[:, None]
    j = n0 + tl.arange(0, BLOCK_N)[None, :]
    nothing = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    x = dot(q_tile, tl.trans(k_tile), nothing, HOW)
    x, slope = score(x, how, seq, h, i, j, EDGE, FOLD)
    p = _weight(x, row_pivot[:, None], row_low[:, None], how, FOLD)
    dp = dot(do, tl.trans(v_tile), nothing, HOW)
    if dropout is not None:
        stays = kept(dropout, seq, h, m0, n0, BLOCK_M, BLOCK_N)
        dp = tl.where(stays, dp * dropout.grow, 0.0)
    ds = p * (dp - row_delta[:, None])
    seen = nothing == 0.0
    bent = ds
    if how.softcap is not None:
        bent = ds * slope
    if EDGE:
        seen = visible(mask, how.bias, seq, h, i, j)
        ds = tl.where(seen, ds, 0.0)
        bent = tl.where(seen, bent, 0.0)
    return ds, bent, seen


@triton.jit
def _dq_step(dq, q_tile, do, row_delta, row_pivot, row_low, k, v, k_head, v_head, mask, how,
             dropout, seq, h, m0, n0, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
             BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             EDGE: tl.constexpr, FOLD: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    """Keys n0 to n0 + BLOCK_N."""
    columns = tl.arange(0, BLOCK_N)
    left = seq.nk - n0
    k_tile = load_tile(k, seq.k0 + n0, left, k_head, columns, tl.arange(0, BLOCK_D), D, EDGE,
                       D != BLOCK_D)  # fmt: skip
    v_tile = load_tile(v, seq.k0 + n0, left, v_head, columns, tl.arange(0, BLOCK_DV), DV, EDGE,
                       DV != BLOCK_DV)  # fmt: skip
    _plain, ds, _seen = _ds(
        q_tile, do, k_tile, v_tile, row_delta, row_pivot, row_low, mask, how, dropout, seq, h, m0,
        n0, BLOCK_M, BLOCK_N, EDGE, FOLD, HOW,
    )  # fmt: skip
    return dot_rounded(ds, k_tile, dq, BLOCK_D, HOW)


@triton.jit
def _dq_pass(dq, lo, hi, q_tile, do, row_delta, row_pivot, row_low, k, v, k_head, v_head, mask, how,
             dropout, seq, h, m0, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
             BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             EDGE: tl.constexpr, FOLD: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
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
                    HOW,
                )  # fmt: skip
        else:
            dq = _dq_step(
                dq, q_tile, do, row_delta, row_pivot, row_low, k, v, k_head, v_head, mask, how,
                dropout, seq, h, m0, n0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, EDGE, FOLD,
                HOW,
            )  # fmt: skip
    return dq


@triton.jit
def _load_all_rows(delta, pivot, low, seq, h, m0, BLOCK_M: tl.constexpr):
    """What is known of queries m0 to m0 + BLOCK_M; low stays None where it is."""
    row_delta = _load_rows(delta, seq, h, m0, 0.0, BLOCK_M, True)
    row_pivot = _load_rows(pivot, seq, h, m0, INF, BLOCK_M, True)
    row_low = tl.zeros([BLOCK_M], tl.float32)
    if low is not None:
        row_low = _load_rows(low, seq, h, m0, 0.0, BLOCK_M, True)
    return row_delta, row_pivot, row_low


@triton.jit
def dq_kernel(q, k, v, dout, delta, pivot, low, spoilt, dq_out, mask, how, dropout, sizes,
              D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr,
              MOST: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    """dq.  One program per BLOCK_M queries of a head; spoilt as in `dkdv_kernel`."""
    entry, h, tile, real = find_tile(mask, sizes, MOST, BLOCK_M, False, sizes.q_heads)
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
        row_delta, row_pivot, row_low = _load_all_rows(delta, pivot, low, seq, h, m0, BLOCK_M)
        lo, full_lo, full_hi, hi = key_span(mask, seq, m0, BLOCK_M, BLOCK_N)
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        # the loop without masks first: ptxas serialises the matrix products otherwise
        dq = _dq_pass(
            dq, full_lo, full_hi, q_tile, do, row_delta, row_pivot, row_low, k, v, k_head, v_head,
            mask, how, dropout, seq, h, m0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, False, FOLD,
            HOW,
        )  # fmt: skip
        if (mask.left is not None) or (mask.keep is not None):
            dq = _dq_pass(
                dq, lo, full_lo, q_tile, do, row_delta, row_pivot, row_low, k, v, k_head, v_head,
                mask, how, dropout, seq, h, m0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, True,
                FOLD, HOW,
            )  # fmt: skip
        dq = _dq_pass(
            dq, full_hi, hi, q_tile, do, row_delta, row_pivot, row_low, k, v, k_head, v_head, mask,
            how, dropout, seq, h, m0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, True, FOLD, HOW,
        )  # fmt: skip
        _store_tile(dq * how.scale, dq_out, seq.q0 + m0, left, seq.entry, h, 0, D, BLOCK_D,
                    BLOCK_M, HOW)  # fmt: skip
        if spoilt is not None:
            wrong = tl.max(tl.where(tl.abs(dq) < INF, 0, 1), 1)
            tl.store(spoilt + tl.program_id(0), tl.max(wrong, 0))


@triton.jit
def dq_again_kernel(q, k, v, dout, delta, pivot, low, spoilt, dq_out, mask, how, dropout, sizes,
                    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
                    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                    FOLD: tl.constexpr, MOST: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    """dq of the tiles that are marked, with `dot_seen`, a few columns at a time."""
    width: tl.constexpr = 32 if BLOCK_D > 32 else BLOCK_D
    entry, h, tile, real = find_tile(mask, sizes, MOST, BLOCK_M, False, sizes.q_heads)
    if real & (tl.load(spoilt + tl.program_id(0), mask=real, other=0) != 0):
        seq = sequence(mask, sizes, entry)
        m0 = tile * BLOCK_M
        kv = h // sizes.group
        q_head = q.ptr + seq.entry.to(tl.int64) * q.batch + h.to(tl.int64) * q.head
        d_head = dout.ptr + seq.entry.to(tl.int64) * dout.batch + h.to(tl.int64) * dout.head
        k_head = k.ptr + seq.entry.to(tl.int64) * k.batch + kv.to(tl.int64) * k.head
        q_tile, do = _load_queries(
            q, dout, None, q_head, d_head, seq, h, m0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, True
        )
        row_delta, row_pivot, row_low = _load_all_rows(delta, pivot, low, seq, h, m0, BLOCK_M)
        lo, full_lo, full_hi, hi = key_span(mask, seq, m0, BLOCK_M, BLOCK_N)
        for c in range(0, BLOCK_D, width):
            dq = tl.zeros([BLOCK_M, width], tl.float32)
            for part in range(3):  # in the order of `dq_kernel`, for the same bits
                start = tl.where(part == 0, full_lo, tl.where(part == 1, lo, full_hi))
                end = tl.where(part == 0, full_hi, tl.where(part == 1, full_lo, hi))
                for n0 in tl.range(start, end, BLOCK_N, num_stages=1):
                    if live(mask, seq, h, m0, n0, BLOCK_M, BLOCK_N):
                        k_tile, v_tile = _load_keys(k, v, seq, kv, n0, D, DV, BLOCK_D, BLOCK_DV,
                                                    BLOCK_N)  # fmt: skip
                        _plain, ds, seen = _ds(q_tile, do, k_tile, v_tile, row_delta, row_pivot,
                                               row_low, mask, how, dropout, seq, h, m0, n0, BLOCK_M,
                                               BLOCK_N, True, FOLD, HOW)  # fmt: skip
                        k_part = load_tile(
                            k, seq.k0 + n0, seq.nk - n0, k_head, tl.arange(0, BLOCK_N),
                            c + tl.arange(0, width), D, True, True,
                        )  # fmt: skip
                        dq = dot_seen(ds, k_part, dq, seen, BLOCK_D, HOW)
            _store_tile(dq * how.scale, dq_out, seq.q0 + m0, seq.nq - m0, seq.entry, h, c, D, width,
                        BLOCK_M, HOW)  # fmt: skip


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
    for b in range(steps_b):
        seq = sequence(mask, sizes, batch + b)
        lo, _full_lo, _full_hi, hi = key_span(mask, seq, m0, BLOCK_M, BLOCK_N)
        for g in range(steps_h):
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
                row_delta, row_pivot, row_low = _load_all_rows(
                    delta, pivot, low, seq, h, m0, BLOCK_M
                )
                ds, _bent, _seen = _ds(
                    q_tile, do, k_tile, v_tile, row_delta, row_pivot, row_low, mask, how, dropout,
                    seq, h, m0, n0, BLOCK_M, BLOCK_N, True, FOLD, HOW,
                )  # fmt: skip
                total += ds
    base = part.ptr + batch.to(tl.int64) * part.batch + head.to(tl.int64) * part.head
    i = m0 + rows
    j = n0 + columns
    if SUM_Q and SUM_K:
        at = base + (m0 // BLOCK_M).to(tl.int64) * part.row + (n0 // BLOCK_N) * part.column
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
