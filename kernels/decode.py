"""Attention of a few new queries to a long cache of keys and values, contiguous or in pages.

The query heads that share a head of keys are rows of one tile, so that a key is read once for all
of them.  A cache is cut into chunks of CHUNK keys (flash decoding; Dao et al., 2023), one program
each, and `merge_kernel` adds up what they found.  Where the cuts are depends on nothing but the
key's index, so the bits of a result depend neither on the batch nor on the room a cache has left.

Caches in int8 or float8_e4m3fn hold a scale per key and head.  Their numbers are exact in 16 bits;
those of float8 are made of their bytes by integer operations, which every GPU has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from attnkit.kernels import host, launch
from attnkit.kernels.parts import INF, LN2, LOG2E, dot, dot_rounded, dot_seen, narrow, tanh

CHUNK = 256  # keys of one program: 128 programs for 8 heads of 4,096 keys, and 16 steps of 16


class Cache(NamedTuple):
    """Where the slots of a cache lie: [row, head, slot, column] arrays, strides in elements."""

    ptr: tl.tensor
    row: tl.tensor
    head: tl.tensor
    slot: tl.tensor
    scale: tl.tensor  # float32 [row, head, slot], contiguous; None: not quantised
    heads: tl.tensor
    slots: tl.tensor
    rows: tl.tensor


class Step(NamedTuple):
    """What a decoding step asks for."""

    lengths: tl.tensor  # int32 [B]
    starts: tl.tensor  # int32 [B] or None
    table: tl.tensor  # int32 [B, table_row]: pages; or None
    table_row: tl.tensor
    index: tl.tensor  # int32 [B]: rows of the cache; or None
    keep: tl.tensor  # uint8 [B, keep_row] or None
    keep_row: tl.tensor
    left: tl.tensor  # the band around each query's own position; None: no limit
    right: tl.tensor
    scale: tl.tensor
    softcap: tl.tensor
    inverse_softcap: tl.tensor
    alibi: tl.tensor
    alibi_batch: tl.tensor


@triton.jit
def _load(cache, page, slot, kv, there, columns, WIDTH: tl.constexpr, FP8: tl.constexpr, TO):
    """Rows `slot` of pages `page` as TO [N, columns], 0 where not `there`."""
    at = page * cache.row + kv.to(tl.int64) * cache.head + slot.to(tl.int64) * cache.slot
    inside = there[:, None] & (columns[None, :] < WIDTH)
    x = tl.load(cache.ptr + at[:, None] + columns[None, :], mask=inside, other=0)
    if FP8:
        # exponent and fraction fill the same places of a float16, whose bias is larger by 8
        size = ((x & 0x7F).to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        size = tl.where((x & 0x7F) == 0x7F, float("nan"), size)
        return tl.where((x & 0x80) != 0, -size, size).to(TO)
    return x.to(TO)


@triton.jit
def _scales(cache, page, slot, kv, there):
    at = (page * cache.heads + kv) * cache.slots + slot
    return tl.load(cache.scale + at, mask=there, other=0.0)


@triton.jit
def _keys(acc, total, top, q, k, v, step, b, kv, n0, first, hi, position, head, rows_there,
          D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
          BLOCK_N: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr, CAREFUL: tl.constexpr,
          HOW: tl.constexpr):  # fmt: skip
    """Keys n0 to n0 + BLOCK_N, less those at or past hi and, in a window, those before first."""
    j = n0 + tl.arange(0, BLOCK_N)
    there = j < hi
    if step.left is not None:
        there = there & (j >= first)
    if step.starts is not None:
        there = there & (j >= tl.load(step.starts + b))
    if step.keep is not None:
        kept = tl.load(step.keep + b.to(tl.int64) * step.keep_row + j, mask=there, other=0)
        there = there & (kept != 0)
    if step.table is not None:
        row = step.table + b.to(tl.int64) * step.table_row
        page = tl.load(row + j // PAGE, mask=there, other=0).to(tl.int64)
        slot = j % PAGE
    else:
        entry = b
        if step.index is not None:
            entry = tl.load(step.index + b)
        page = tl.zeros([BLOCK_N], tl.int64) + entry
        slot = j
    k_tile = _load(k, page, slot, kv, there, tl.arange(0, BLOCK_D), D, FP8, q.dtype)
    x = dot(q, tl.trans(k_tile), tl.zeros([q.shape[0], BLOCK_N], tl.float32), HOW)
    if k.scale is not None:
        x = x * _scales(k, page, slot, kv, there)[None, :]
    x = x * step.scale
    if step.softcap is not None:
        x = tanh(x * step.inverse_softcap) * step.softcap
    if step.alibi is not None:
        slope = tl.load(step.alibi + b * step.alibi_batch + head, mask=rows_there, other=0.0)
        x = x - slope[:, None] * tl.abs(j[None, :] - position[:, None]).to(tl.float32)
    seen = there[None, :] & rows_there[:, None]
    if step.left is not None:
        seen = seen & (j[None, :] >= position[:, None] - step.left)
    if step.right is not None:
        seen = seen & (j[None, :] <= position[:, None] + step.right)
    x = tl.where(seen, x, -INF)
    higher = tl.maximum(top, tl.max(x, 1))
    pivot = tl.where(higher == -INF, 0.0, higher)
    p = tl.math.exp2((x - pivot[:, None]) * LOG2E)
    fade = tl.math.exp2((top - pivot) * LOG2E)
    total = total * fade + tl.sum(p, 1)
    acc = acc * fade[:, None]
    v_tile = _load(v, page, slot, kv, there, tl.arange(0, BLOCK_DV), DV, FP8, q.dtype)
    if v.scale is not None:
        # the largest scale is taken out: weights stay near 1, where 16 bits are finest
        scales = _scales(v, page, slot, kv, there)
        largest = tl.max(tl.where(scales == scales, tl.abs(scales), 0.0), 0)
        p = tl.where(seen, p * (scales / tl.where(largest > 0.0, largest, 1.0))[None, :], 0.0)
        found = tl.zeros_like(acc)
        if CAREFUL:
            found = dot_seen(p, v_tile, found, seen, BLOCK_DV, HOW)
        else:
            found = dot_rounded(p, v_tile, found, BLOCK_DV, HOW)
        acc += found * largest
    elif CAREFUL:
        acc = dot_seen(p, v_tile, acc, seen, BLOCK_DV, HOW)
    else:
        acc = dot_rounded(p, v_tile, acc, BLOCK_DV, HOW)
    return acc, total, higher


@triton.jit
def _length(cache, step, b, PAGE: tl.constexpr):
    """(keys of sequence b, whether it has room for so many); ends the kernel if it has not."""
    length = tl.load(step.lengths + b)
    room = cache.slots
    if step.table is not None:
        room = step.table_row * PAGE
    fits = (length >= 0) & (length <= room)
    tl.device_assert(fits, "lengths: a sequence is longer than its cache")
    return length, fits


@triton.jit
def _rows_exist(cache, step, b, first, hi, PAGE: tl.constexpr, PAGES: tl.constexpr):
    """Whether the cache has the rows of keys first to hi; ends the kernel if it has not.

    PAGES: a power of two, no less than the pages that the keys of a chunk may lie in.
    """
    exist = b >= 0
    if step.table is not None:
        if step.starts is not None:
            first = tl.maximum(first, tl.load(step.starts + b))
        place = tl.maximum(first, 0) // PAGE + tl.arange(0, PAGES)
        page = tl.load(step.table + b.to(tl.int64) * step.table_row + place,
                       mask=(place * PAGE < hi) & (place < step.table_row), other=0)  # fmt: skip
        exist = tl.min(((page >= 0) & (page < cache.rows)).to(tl.int32), 0) > 0
        tl.device_assert(exist, "block_table: no such page")
    elif step.index is not None:
        row = tl.load(step.index + b)
        exist = (row >= 0) & (row < cache.rows)
        tl.device_assert(exist, "batch_index: no such row")
    return exist


@triton.jit
def decode_kernel(q, q_batch, q_head, q_row, k, v, part, part_lse, step, heads, group, queries,
                  splits, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
                  BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                  SIZE: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr, FP8: tl.constexpr,
                  MANY: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    """One chunk of SIZE keys for BLOCK_M of the queries * group rows of a head of keys.

    Grid: splits * row tiles * Hkv * B programs, splits innermost.  part: float32
    [B, Hq, Lq, splits, DV]; part_lse: float32 [B, Hq, Lq, splits].  MANY: more than one query.
    """
    split = tl.program_id(0) % splits
    rest = tl.program_id(0) // splits
    tiles = tl.cdiv(queries * group, BLOCK_M)
    tile = rest % tiles
    rest = rest // tiles
    kv = rest % heads
    b = rest // heads
    length, there = _length(k, step, b, PAGE)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    rows_there = row < queries * group
    query = row // group
    head = kv * group + row % group
    position = length - queries + query
    lo = split * SIZE
    first = lo
    hi = tl.minimum(lo + SIZE, length)
    if step.right is not None:
        hi = tl.minimum(
            hi, length - queries + (tile * BLOCK_M + BLOCK_M - 1) // group + step.right + 1
        )
    if step.left is not None:
        # no row sees a key before it, whose slot or page may hold anything
        first = tl.maximum(lo, length - queries + tile * BLOCK_M // group - step.left)
        lo = first // BLOCK_N * BLOCK_N
    there = there & _rows_exist(k, step, b, first, hi, PAGE, PAGES)
    hi = tl.where(there, hi, lo)
    q_at = b.to(tl.int64) * q_batch + head.to(tl.int64) * q_head + query.to(tl.int64) * q_row
    columns = tl.arange(0, BLOCK_D)
    q_there = rows_there[:, None] & (columns[None, :] < D)
    q_tile = tl.load(q + q_at[:, None] + columns[None, :], mask=q_there, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], -INF, tl.float32)
    for n0 in tl.range(lo, hi, BLOCK_N):
        acc, total, top = _keys(
            acc, total, top, q_tile, k, v, step, b, kv, n0, first, hi, position, head, rows_there,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PAGE, FP8, False, HOW,
        )  # fmt: skip
    if MANY:
        # queries that see different keys: what is hidden from one only was read all the same
        wrong = tl.max(tl.where(tl.abs(acc) < INF, 0, 1), 1)
        if tl.max(wrong, 0) > 0:
            acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            top = tl.full([BLOCK_M], -INF, tl.float32)
            for n0 in tl.range(lo, hi, BLOCK_N, num_stages=1):
                acc, total, top = _keys(
                    acc, total, top, q_tile, k, v, step, b, kv, n0, first, hi, position, head,
                    rows_there, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PAGE, FP8, True, HOW,
                )  # fmt: skip
    some = total != 0.0
    divisor = tl.where(some, total, 1.0)
    at = ((b.to(tl.int64) * heads * group + head) * queries + query) * splits + split
    lse = tl.where(some, top + tl.math.log2(divisor) * LN2, -INF)
    tl.store(part_lse + at, lse, mask=rows_there)
    columns = tl.arange(0, BLOCK_DV)
    there = rows_there[:, None] & (columns[None, :] < DV)
    tl.store(part + at[:, None] * DV + columns[None, :], acc / divisor[:, None], mask=there)


@triton.jit
def merge_kernel(part, part_lse, sinks, lengths, out, out_batch, out_head, out_row, lse, heads,
                 queries, splits, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
                 SIZE: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    """out [B, Hq, Lq, DV] and lse [B, Hq, Lq] of one query, out of what the chunks hold."""
    row = tl.program_id(0).to(tl.int64)
    query = row % queries
    head = row // queries % heads
    b = row // queries // heads
    columns = tl.arange(0, BLOCK_DV)
    inside = columns < DV
    acc = tl.zeros([BLOCK_DV], tl.float32)
    total = 0.0
    top = -INF
    if sinks is not None:
        top = tl.load(sinks + head)
        total = tl.where(top == -INF, 0.0, 1.0)
    used = tl.minimum(tl.cdiv(tl.load(lengths + b), SIZE), splits)
    for split in range(used):
        at = row * splits + split
        x = tl.load(part_lse + at)
        higher = tl.where((x > top) | (x != x), x, top)
        pivot = tl.where(higher == -INF, 0.0, higher)
        fade = tl.math.exp2((top - pivot) * LOG2E)
        weight = tl.math.exp2((x - pivot) * LOG2E)
        acc = acc * fade + weight * tl.load(part + at * DV + columns, mask=inside, other=0.0)
        total = total * fade + weight
        top = higher
    some = total != 0.0
    divisor = tl.where(some, total, 1.0)
    tl.store(lse + row, tl.where(some, top + tl.math.log2(divisor) * LN2, -INF))
    to = out + b * out_batch + head * out_head + query * out_row
    tl.store(to + columns, narrow(acc / divisor, out.dtype.element_ty, HOW), mask=inside)


def _cache(t: torch.Tensor, scale: torch.Tensor | None) -> Cache:
    if t.dtype == torch.float8_e4m3fn:
        t = t.view(torch.uint8)
    scale = None if scale is None else scale.contiguous()
    return Cache(t, *t.stride()[:3], scale, t.shape[1], t.shape[2], t.shape[0])


def decode(q, k, v, args, spec, cache):
    """out [B, Hq, Lq, Dv] and lse [B, Hq, Lq] of queries on a cache k, v [N, Hkv, S, .]."""
    (batch, q_heads, queries, d), dv = q.shape, v.shape[3]
    out = host.empty_like(q, dv)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    q, k, v = host.laid_out(q), _readable(k), _readable(v)
    table = cache.block_table
    page = k.shape[2]
    capacity = page * (1 if table is None else table.shape[1])
    splits = max(1, triton.cdiv(capacity, CHUNK))
    heads = k.shape[1]
    group = q_heads // max(heads, 1)
    part = q.new_empty((batch, q_heads, queries, splits, dv), dtype=torch.float32)
    part_lse = q.new_empty((batch, q_heads, queries, splits), dtype=torch.float32)
    block_m = min(64, max(16, triton.next_power_of_2(queries * group)))
    block_d, block_dv = host.padded(d), host.padded(dv)
    block_n = launch.decode_block(max(block_d, block_dv), q.element_size())
    keep = None if args.keep is None else args.keep.contiguous().view(torch.uint8)
    cap, alibi, sinks = spec.softcap, args.alibi, args.sinks
    sinks = None if sinks is None else sinks.contiguous()
    step = Step(
        lengths=args.lengths.contiguous(),
        starts=None if cache.starts is None else cache.starts.contiguous(),
        table=None if table is None else table.contiguous(),
        table_row=None if table is None else table.shape[1],
        index=None if cache.batch_index is None else cache.batch_index.contiguous(),
        keep=keep,
        keep_row=None if keep is None else keep.shape[1],
        left=host.clamped(spec.left, capacity + queries),
        right=host.clamped(spec.right, capacity + queries),
        scale=float(spec.scale),
        softcap=float(cap) if cap > 0 else None,
        inverse_softcap=1.0 / cap if cap > 0 else None,
        alibi=None if alibi is None else alibi.contiguous(),
        alibi_batch=None if alibi is None else (0 if alibi.shape[0] == 1 else alibi.shape[1]),
    )
    tiles = triton.cdiv(queries * group, block_m)
    pages = triton.next_power_of_2(triton.cdiv(CHUNK, max(page, 1)) + 1)
    decode_kernel[(splits * tiles * heads * batch,)](
        q=q, q_batch=q.stride(0), q_head=q.stride(1), q_row=q.stride(2),
        k=_cache(k, cache.k_scale), v=_cache(v, cache.v_scale), part=part, part_lse=part_lse,
        step=step, heads=heads, group=group, queries=queries, splits=splits, D=d, DV=dv,
        BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK_M=block_m, BLOCK_N=block_n, SIZE=CHUNK,
        PAGE=max(page, 1), PAGES=pages, FP8=k.dtype == torch.float8_e4m3fn, MANY=queries > 1,
        HOW=host.precision(q.dtype), num_warps=4, num_stages=3,
        debug=True, sanitize_overflow=False,  # of what `debug` adds, device_assert alone
    )  # fmt: skip
    merge_kernel[(batch * q_heads * queries,)](
        part=part, part_lse=part_lse, sinks=sinks, lengths=step.lengths, out=out,
        out_batch=out.stride(0), out_head=out.stride(1), out_row=out.stride(2), lse=lse,
        heads=q_heads, queries=queries, splits=splits, DV=dv, BLOCK_DV=block_dv, SIZE=CHUNK,
        HOW=host.precision(q.dtype), num_warps=1,
    )  # fmt: skip
    return out, lse


def _readable(t: torch.Tensor) -> torch.Tensor:
    return t if t.shape[-1] <= 1 or t.stride(-1) == 1 else t.contiguous()
