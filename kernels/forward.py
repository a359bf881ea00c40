"""out = dropout(softmax(score(q k^T), over visible keys)) v;  lse = logsumexp of each row, float32.

One program owns BLOCK_M queries of one head and passes over their keys once, with the running
maximum and sum of Milakov and Gimelshein (Online normalizer calculation for softmax, 2018) as in
FlashAttention-2 (Dao, 2023).  Tiles that all its queries see in full are a loop without masks.

A product with weight 0 does not silence NaN and infinity.  A program that ends with one of them
marks its tile, which a second kernel then computes again with `dot_seen`; it does nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl
from attnkit.kernels import host
from attnkit.kernels.parts import (
    INF,
    LN2,
    LOG2E,
    LOWEST,
    Rows,
    dot,
    dot_rounded,
    dot_seen,
    find_tile,
    kept,
    key_span,
    live,
    load_tile,
    narrow,
    score,
    sequence,
    visible,
)


@triton.jit
def _nothing(how, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, FOLD: tl.constexpr):
    """acc, total and top of rows that have seen no key.

    A finite top keeps exp2(-inf - top) at 0, not NaN, while all scores so far are -inf.
    """
    lowest = LOWEST
    if FOLD:  # that it stays finite, times the scale
        lowest = -3e38 / tl.maximum(how.scale * LOG2E, 1.0)
    top = tl.zeros([BLOCK_M], tl.float32) + lowest
    return tl.zeros([BLOCK_M, BLOCK_DV], tl.float32), tl.zeros([BLOCK_M], tl.float32), top


@triton.jit
def _step(acc, total, top, q, k_head, v_head, k, v, desc, mask, how, dropout, seq, h, kv,
          m0, n0, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EDGE: tl.constexpr, FOLD: tl.constexpr,
          CAREFUL: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    """Keys n0 to n0 + BLOCK_N."""
    i = m0 + tl.arange(0, BLOCK_M)[:, None]
    columns = tl.arange(0, BLOCK_N)
    j = n0 + columns[None, :]
    if desc is not None:
        k_tile = desc[0].load([seq.entry, kv, n0, 0]).reshape(BLOCK_N, BLOCK_D)
        v_tile = desc[1].load([seq.entry, kv, n0, 0]).reshape(BLOCK_N, BLOCK_DV)
    else:
        left = seq.nk - n0
        k_tile = load_tile(
            k, seq.k0 + n0, left, k_head, columns, tl.arange(0, BLOCK_D), D, EDGE, D != BLOCK_D
        )
        v_tile = load_tile(
            v, seq.k0 + n0, left, v_head, columns, tl.arange(0, BLOCK_DV), DV, EDGE, DV != BLOCK_DV
        )
    x = dot(q, tl.trans(k_tile), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), HOW)
    x, _ = score(x, how, seq, h, i, j, EDGE, FOLD)
    if EDGE:
        seen = visible(mask, how.bias, seq, h, i, j)
        x = tl.where(seen, x, -INF)
    higher = tl.maximum(top, tl.max(x, 1))
    if FOLD:
        unit = how.scale * LOG2E
        p = tl.math.exp2(x * unit - (higher * unit)[:, None])
        fade = tl.math.exp2(top * unit - higher * unit)
    else:
        p = tl.math.exp2((x - higher[:, None]) * LOG2E)
        fade = tl.math.exp2((top - higher) * LOG2E)
    total = total * fade + tl.sum(p, 1)
    if dropout is not None:
        p = tl.where(kept(dropout, seq, h, m0, n0, BLOCK_M, BLOCK_N), p, 0.0)
    acc = acc * fade[:, None]
    if CAREFUL:
        acc = dot_seen(p, v_tile, acc, seen, BLOCK_DV, HOW)
    else:
        acc = dot_rounded(p, v_tile, acc, BLOCK_DV, HOW)
    return acc, total, higher


@triton.jit
def _pass(acc, total, top, lo, hi, q, k_head, v_head, k, v, desc, mask, how, dropout, seq,
          h, kv, m0, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
          BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EDGE: tl.constexpr,
          FOLD: tl.constexpr, CAREFUL: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    """All keys from lo to hi."""
    stages: tl.constexpr = 1 if CAREFUL else None  # a rare pass takes no buffers from the others
    for n0 in tl.range(lo, hi, BLOCK_N, num_stages=stages):
        n0 = tl.multiple_of(n0, BLOCK_N)
        if EDGE and (
            (mask.keep is not None) or (mask.q_segments is not None) or (mask.blocks is not None)
        ):
            if live(mask, seq, h, m0, n0, BLOCK_M, BLOCK_N):
                acc, total, top = _step(
                    acc, total, top, q, k_head, v_head, k, v, desc, mask, how, dropout,
                    seq, h, kv, m0, n0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, EDGE, FOLD,
                    CAREFUL, HOW,
                )  # fmt: skip
        else:
            acc, total, top = _step(
                acc, total, top, q, k_head, v_head, k, v, desc, mask, how, dropout, seq,
                h, kv, m0, n0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, EDGE, FOLD, CAREFUL, HOW,
            )  # fmt: skip
    return acc, total, top


@triton.jit
def _store(acc, total, top, out, lse, sinks, how, dropout, seq, h, m0, DV: tl.constexpr,
           BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, FOLD: tl.constexpr,
           HOW: tl.constexpr):  # fmt: skip
    """Write out and lse of the rows; a row without a key, and without a sink, gets 0 and -inf."""
    i = m0 + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_DV)
    top = top * how.scale if FOLD else top
    top = tl.where(total == 0.0, -INF, top)  # scale * -inf is NaN where the scale is 0
    if sinks is not None:
        sink = tl.load(sinks + h)
        higher = tl.maximum(top, sink)
        pivot = tl.where(higher == -INF, 0.0, higher)
        fade = tl.math.exp2((top - pivot) * LOG2E)
        total = total * fade + tl.math.exp2((sink - pivot) * LOG2E)
        acc = acc * fade[:, None]
        top = higher
    some = total != 0.0
    divisor = tl.where(some, total, 1.0)
    acc = acc / divisor[:, None]
    if dropout is not None:
        acc = acc * dropout.grow
    row_lse = tl.where(some, top + tl.math.log2(divisor) * LN2, -INF)
    inside = i < seq.nq
    at = (seq.entry.to(tl.int64) * lse.heads + h) * lse.rows + seq.q0
    tl.store(lse.ptr + at + i, row_lse, mask=inside)
    head = out.ptr + seq.entry.to(tl.int64) * out.batch + h.to(tl.int64) * out.head
    entry = head + (seq.q0 + i).to(tl.int64)[:, None] * out.row + columns[None, :]
    there = inside[:, None] & (columns[None, :] < DV)
    tl.store(entry, narrow(acc, out.ptr.dtype.element_ty, HOW), mask=there)


@triton.jit
def forward_kernel(q, k, v, out, lse, desc, sinks, spoilt, mask, how, dropout, sizes,
                   D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
                   BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                   FOLD: tl.constexpr, MOST: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    """Grid: sizes.tiles programs per head, and q_heads * batch of those (packed: q_heads).

    q [B, Hq, Lq, D], k and v [B, Hkv, Lk, .], out [B, Hq, Lq, DV], lse fp32 [B, Hq, Lq].  desc: TMA
    descriptors of k and v, or None.  spoilt: int32, one per program: whether it ended with NaN or
    infinity; None: nobody asks.
    """
    entry, h, tile, real = find_tile(mask, sizes, MOST, BLOCK_M, False, sizes.q_heads)
    if real:
        seq = sequence(mask, sizes, entry)
        m0 = tile * BLOCK_M
        kv = h // sizes.group
        q_tile, k_head, v_head = _heads(q, k, v, seq, h, kv, m0, D, BLOCK_D, BLOCK_M)
        lo, full_lo, full_hi, hi = key_span(mask, seq, m0, BLOCK_M, BLOCK_N)
        acc, total, top = _nothing(how, BLOCK_M, BLOCK_DV, FOLD)
        # the loop without masks first: ptxas serialises the matrix products otherwise
        acc, total, top = _pass(
            acc, total, top, full_lo, full_hi, q_tile, k_head, v_head, k, v, desc, mask,
            how, dropout, seq, h, kv, m0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, False, FOLD,
            False, HOW,
        )  # fmt: skip
        if (mask.left is not None) or (mask.keep is not None):
            acc, total, top = _pass(
                acc, total, top, lo, full_lo, q_tile, k_head, v_head, k, v, desc, mask,
                how, dropout, seq, h, kv, m0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, True,
                FOLD, False, HOW,
            )  # fmt: skip
        acc, total, top = _pass(
            acc, total, top, full_hi, hi, q_tile, k_head, v_head, k, v, desc, mask, how,
            dropout, seq, h, kv, m0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, True, FOLD, False,
            HOW,
        )  # fmt: skip
        if spoilt is not None:
            wrong = tl.max(tl.where(tl.abs(acc) < INF, 0, 1), 1)
            wrong = wrong | tl.where(total < INF, 0, 1)
            tl.store(spoilt + tl.program_id(0), tl.max(wrong, 0))
        _store(acc, total, top, out, lse, sinks, how, dropout, seq, h, m0, DV, BLOCK_M, BLOCK_DV,
               FOLD, HOW)  # fmt: skip


@triton.jit
def forward_again_kernel(q, k, v, out, lse, sinks, spoilt, mask, how, dropout, sizes,
                         D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
                         BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                         FOLD: tl.constexpr, MOST: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    """out and lse of the tiles that are marked, with `dot_seen`.

    A kernel of its own, since its registers would weigh upon the loops of the other.
    """
    entry, h, tile, real = find_tile(mask, sizes, MOST, BLOCK_M, False, sizes.q_heads)
    if real & (tl.load(spoilt + tl.program_id(0), mask=real, other=0) != 0):
        seq = sequence(mask, sizes, entry)
        m0 = tile * BLOCK_M
        kv = h // sizes.group
        q_tile, k_head, v_head = _heads(q, k, v, seq, h, kv, m0, D, BLOCK_D, BLOCK_M)
        lo, full_lo, full_hi, hi = key_span(mask, seq, m0, BLOCK_M, BLOCK_N)
        acc, total, top = _nothing(how, BLOCK_M, BLOCK_DV, FOLD)
        for part in range(3):  # in the order of `forward_kernel`, for the same bits
            start = tl.where(part == 0, full_lo, tl.where(part == 1, lo, full_hi))
            end = tl.where(part == 0, full_hi, tl.where(part == 1, full_lo, hi))
            acc, total, top = _pass(
                acc, total, top, start, end, q_tile, k_head, v_head, k, v, None, mask, how,
                dropout, seq, h, kv, m0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, True, FOLD,
                True, HOW,
            )  # fmt: skip
        _store(acc, total, top, out, lse, sinks, how, dropout, seq, h, m0, DV, BLOCK_M, BLOCK_DV,
               FOLD, HOW)  # fmt: skip


@triton.jit
def _heads(q, k, v, seq, h, kv, m0, D: tl.constexpr, BLOCK_D: tl.constexpr,
           BLOCK_M: tl.constexpr):  # fmt: skip
    """(queries m0 to m0 + BLOCK_M, pointers to the head of keys and to that of values)."""
    q_head = q.ptr + seq.entry.to(tl.int64) * q.batch + h.to(tl.int64) * q.head
    k_head = k.ptr + seq.entry.to(tl.int64) * k.batch + kv.to(tl.int64) * k.head
    v_head = v.ptr + seq.entry.to(tl.int64) * v.batch + kv.to(tl.int64) * v.head
    q_tile = load_tile(q, seq.q0 + m0, seq.nq - m0, q_head, tl.arange(0, BLOCK_M),
                       tl.arange(0, BLOCK_D), D, True, D != BLOCK_D)  # fmt: skip
    return q_tile, k_head, v_head


def forward(q, k, v, args, spec):
    """out [B, Hq, Lq, Dv] in q's dtype and layout, and lse [B, Hq, Lq] in float32."""
    call = host.Call(q, k, v, args, spec)
    out, lse = call.new_out(v.shape[3]), call.new_lse()
    if out.numel() == 0 and lse.numel() == 0:
        return out, lse
    if args.cu_seqlens_q is not None:  # rows may belong to no sequence
        out.zero_()
        lse.fill_(-float("inf"))
    keys = call.tensors[1:]
    config = call.config("forward bias" if call.float_bias else "forward", described=keys)
    desc = call.descriptors(config, *keys, config.block_n)
    tiles, grid = call.query_grid(config.block_m)
    arguments = {
        "q": call.q,
        "k": call.k,
        "v": call.v,
        "out": host.array(out),
        "lse": Rows(lse, lse.shape[1], lse.shape[2]),
        "sinks": call.sinks,
        "spoilt": call.marks(grid),
        "mask": call.mask,
        "how": call.score,
        "dropout": call.dropout,
        "sizes": call.sizes(tiles),
        "FOLD": call.fold,
        **call.constants(config),
    }
    forward_kernel[grid](**arguments, desc=desc, **config.options())
    if arguments["spoilt"] is not None:
        forward_again_kernel[grid](**arguments, num_warps=config.warps, num_stages=1)
    return out, lse
