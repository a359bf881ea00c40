"""What the kernels share on the device: where a tile stands, what it sees, and its scores.

An optional part of a call is None where it is absent, which Triton takes as a constant: a kernel
without masks holds no trace of them.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of the finite numbers in float32
BLOCK = tl.constexpr(64)  # rows and columns of one flag of Mask.blocks
NARROW = tl.constexpr(16)  # columns of a result whose products cost next to nothing


class Array(NamedTuple):
    """A [batch, head, row, column] array whose columns lie side by side.  Strides in elements."""

    ptr: tl.tensor
    batch: tl.tensor
    head: tl.tensor
    row: tl.tensor


class Rows(NamedTuple):
    """A contiguous float32 array [batch, head, row], such as lse."""

    ptr: tl.tensor
    heads: tl.tensor
    rows: tl.tensor


class Dense(NamedTuple):
    """A mask or bias for every score; strides are 0 where it was broadcast."""

    ptr: tl.tensor
    batch: tl.tensor
    head: tl.tensor
    row: tl.tensor
    column: tl.tensor


class Mask(NamedTuple):
    """The structured mask of a call, see attnkit.spec.TensorArgs; None is "no such part"."""

    left: tl.tensor  # the band: i + off - left <= j <= i + off + right
    right: tl.tensor
    bottom_right: tl.tensor  # 1: off is the number of keys less that of queries; None: 0
    lengths: tl.tensor
    keep: tl.tensor  # uint8 [B, keep_row]
    keep_row: tl.tensor
    keep_range: tl.tensor  # int32 [B, 3]: first kept key, one past the last, whether all between
    q_segments: tl.tensor  # int32 [B, segments_q], [B, segments_k]
    k_segments: tl.tensor
    segments_q: tl.tensor
    segments_k: tl.tensor
    blocks: tl.tensor  # uint8, one flag per 64 x 64 scores
    blocks_batch: tl.tensor
    blocks_head: tl.tensor
    blocks_row: tl.tensor
    dense: Dense  # uint8, not 0 = attend
    cu_q: tl.tensor  # int32 [sequences + 1]
    cu_k: tl.tensor
    sequences: tl.tensor


class Score(NamedTuple):
    """What becomes of q . k before the softmax."""

    scale: tl.tensor
    softcap: tl.tensor
    inverse_softcap: tl.tensor
    alibi: tl.tensor  # float32 [B or 1, Hq]
    alibi_batch: tl.tensor
    bias: Dense  # float


class Dropout(NamedTuple):
    """Of 24 random bits a weight needs at least `threshold` to stay, and then grows by `grow`."""

    seed: tl.tensor
    threshold: tl.tensor
    grow: tl.tensor


class Sizes(NamedTuple):
    """Counts of a call."""

    q_heads: tl.tensor
    group: tl.tensor  # query heads per head of keys
    lq: tl.tensor
    lk: tl.tensor
    tiles: tl.tensor  # programs per head


class Sequence(NamedTuple):
    """One sequence of the batch, or one packed sequence (all of those live in batch entry 0)."""

    entry: tl.tensor  # index in the tensors' batch dimension
    number: tl.tensor  # index for dropout
    q0: tl.tensor  # first row and number of queries
    nq: tl.tensor
    k0: tl.tensor  # first row and number of keys, after lengths
    nk: tl.tensor
    lo: tl.tensor  # the band: lo <= j - i <= hi
    hi: tl.tensor
    off: tl.tensor  # position of query 0 among the keys
    first: tl.tensor  # keys before it are hidden from all queries
    solid: tl.tensor  # whether keep hides no key from `first` to nk


# ------------------------------------------------------------- where a tile stands


@triton.jit
def sequence(mask, sizes, entry):
    """Sequence number `entry` of the call."""
    q0 = 0
    k0 = 0
    nq = sizes.lq
    nk = sizes.lk
    number = entry
    if mask.cu_q is not None:
        q0 = tl.load(mask.cu_q + entry)
        k0 = tl.load(mask.cu_k + entry)
        nq = tl.load(mask.cu_q + entry + 1) - q0
        nk = tl.load(mask.cu_k + entry + 1) - k0
        entry = entry * 0
    off = 0
    if mask.bottom_right is not None:
        off = nk - nq
    lo = 0
    hi = 0
    if mask.left is not None:
        lo = off - mask.left
    if mask.right is not None:
        hi = off + mask.right
    if mask.lengths is not None:
        nk = tl.minimum(nk, tl.load(mask.lengths + entry))
    first = 0
    solid = 1
    if mask.keep is not None:
        solid = 0
        if mask.keep_range is not None:
            first = tl.load(mask.keep_range + entry * 3)
            nk = tl.minimum(nk, tl.load(mask.keep_range + entry * 3 + 1))
            solid = tl.load(mask.keep_range + entry * 3 + 2)
    return Sequence(entry, number, q0, nq, k0, nk, lo, hi, off, first, solid)


@triton.jit
def find_sequence(cu, sequences, tile, SIZE: tl.constexpr, MOST: tl.constexpr):
    """(sequence, tile in it) of the packed sequence that owns the tile with this number.

    Tiles have SIZE rows and belong to one sequence each; for numbers past the last tile the
    sequence is at least `sequences`.  MOST, a power of two, are looked at together.
    """
    found = tile * 0
    before = tile * 0  # tiles of the sequences before that one
    total = tile * 0  # tiles of all that were looked at
    for first in tl.range(0, sequences, MOST, num_stages=1):
        n = first + tl.arange(0, MOST)
        start = tl.load(cu + n, mask=n < sequences, other=0)
        end = tl.load(cu + n + 1, mask=n < sequences, other=0)
        tiles = tl.cdiv(tl.maximum(end - start, 0), SIZE)
        passed = total + tl.cumsum(tiles, 0) <= tile
        found += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(tl.where(passed, tiles, 0), 0)
        total += tl.sum(tiles, 0)
    return found, tile - before


@triton.jit
def find_tile(mask, sizes, MOST: tl.constexpr, SIZE: tl.constexpr, OF_KEYS: tl.constexpr,
              heads):  # fmt: skip
    """(batch or packed entry, head, tile, whether there is such a tile) of this program."""
    tile = tl.program_id(0) % sizes.tiles
    head = tl.program_id(0) // sizes.tiles
    h = head % heads
    entry = head // heads
    real = tile >= 0
    if mask.cu_q is not None:
        cu = mask.cu_k if OF_KEYS else mask.cu_q
        entry, tile = find_sequence(cu, mask.sequences, tile, SIZE, MOST)
        real = entry < mask.sequences
    elif mask.right is not None and not OF_KEYS:
        tile = sizes.tiles - 1 - tile  # the longest rows first
    return entry, h, tile, real


@triton.jit
def keep_range_kernel(keep, lk, out, SIZE: tl.constexpr):
    """Row b of out [B, 3]: first kept key, one past the last, whether all between are kept."""
    b = tl.program_id(0)
    first = lk
    last = 0
    count = 0
    for start in range(0, lk, SIZE):
        j = start + tl.arange(0, SIZE)
        kept = tl.load(keep + b.to(tl.int64) * lk + j, mask=j < lk, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(kept, j, lk), 0))
        last = tl.maximum(last, tl.max(tl.where(kept, j + 1, 0), 0))
        count += tl.sum(kept.to(tl.int32), 0)
    first = tl.minimum(first, last)
    tl.store(out + b * 3, first)
    tl.store(out + b * 3 + 1, last)
    tl.store(out + b * 3 + 2, (count == last - first).to(tl.int32))


# ------------------------------------------------------------- what a tile sees


@triton.jit
def key_span(mask, seq, m0, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tiles of keys for queries m0 to m0 + BLOCK_M: (lo, full_lo, full_hi, hi).

    All queries see all keys from full_lo to full_hi, and none sees one outside lo to hi.  Both
    limits of full, and lo, are multiples of BLOCK_N.
    """
    last = tl.minimum(m0 + BLOCK_M, seq.nq) - 1
    lo = seq.first
    hi = seq.nk
    full_hi = seq.nk // BLOCK_N * BLOCK_N
    if mask.right is not None:
        hi = tl.minimum(hi, last + seq.hi + 1)
        full_hi = tl.minimum(full_hi, tl.maximum(m0 + seq.hi + 1, 0) // BLOCK_N * BLOCK_N)
    if mask.left is not None:
        lo = tl.maximum(lo, m0 + seq.lo)
    full_lo = tl.cdiv(lo, BLOCK_N) * BLOCK_N
    if mask.left is not None:
        reached = tl.maximum(last + seq.lo, 0)
        full_lo = tl.maximum(full_lo, tl.cdiv(reached, BLOCK_N) * BLOCK_N)
    lo = tl.maximum(lo, 0) // BLOCK_N * BLOCK_N
    if mask.keep is not None:
        full_hi = tl.where(seq.solid != 0, full_hi, 0)
    if (mask.q_segments is not None) or (mask.blocks is not None) or (mask.dense is not None):
        full_hi = full_lo * 0
    # without full tiles all of it is one stretch, [lo, hi)
    some = full_hi > full_lo
    full_lo = tl.where(some, full_lo, lo)
    full_hi = tl.where(some, full_hi, lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def query_span(mask, seq, n0, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tiles of queries for keys n0 to n0 + BLOCK_N, as `key_span` is for keys."""
    last = tl.minimum(n0 + BLOCK_N, seq.nk) - 1
    lo = n0 * 0
    hi = seq.nq
    full_lo = lo
    full_hi = seq.nq // BLOCK_M * BLOCK_M
    if mask.right is not None:
        lo = tl.maximum(lo, n0 - seq.hi)
        full_lo = tl.cdiv(tl.maximum(last - seq.hi, 0), BLOCK_M) * BLOCK_M
        lo = lo // BLOCK_M * BLOCK_M
    if mask.left is not None:
        hi = tl.minimum(hi, last - seq.lo + 1)
        full_hi = tl.minimum(full_hi, tl.maximum(n0 - seq.lo + 1, 0) // BLOCK_M * BLOCK_M)
    whole = n0 + BLOCK_N <= seq.nk
    if mask.keep is not None:
        whole = whole & (n0 >= seq.first) & (seq.solid != 0)
        hi = tl.where(n0 + BLOCK_N <= seq.first, 0, hi)
    hi = tl.where(n0 < seq.nk, hi, 0)
    if (mask.q_segments is not None) or (mask.blocks is not None) or (mask.dense is not None):
        whole = n0 < 0
    some = whole & (full_hi > full_lo)
    full_lo = tl.where(some, full_lo, lo)
    full_hi = tl.where(some, full_hi, lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def live(mask, seq, h, m0, n0, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Whether segments, blocks and keep may leave anything of a tile: where not, it is skipped."""
    some = n0 < seq.nk
    if mask.keep is not None:
        j = n0 + tl.arange(0, BLOCK_N)
        row = mask.keep + seq.entry.to(tl.int64) * mask.keep_row + seq.k0
        kept = tl.load(row + j, mask=j < seq.nk, other=0)
        some = some & (tl.max(kept.to(tl.int32), 0) > 0)
    if mask.q_segments is not None:
        i = m0 + tl.arange(0, BLOCK_M)
        j = n0 + tl.arange(0, BLOCK_N)
        q_row = mask.q_segments + seq.entry.to(tl.int64) * mask.segments_q + seq.q0
        k_row = mask.k_segments + seq.entry.to(tl.int64) * mask.segments_k + seq.k0
        low: tl.constexpr = -2147483648
        high: tl.constexpr = 2147483647
        q_least = tl.min(tl.load(q_row + i, mask=i < seq.nq, other=high), 0)
        q_most = tl.max(tl.load(q_row + i, mask=i < seq.nq, other=low), 0)
        k_least = tl.min(tl.load(k_row + j, mask=j < seq.nk, other=high), 0)
        k_most = tl.max(tl.load(k_row + j, mask=j < seq.nk, other=low), 0)
        some = some & (q_least <= k_most) & (k_least <= q_most)
    if mask.blocks is not None:
        i = m0 // BLOCK + tl.arange(0, (BLOCK_M + BLOCK - 1) // BLOCK)[:, None]
        j = n0 // BLOCK + tl.arange(0, (BLOCK_N + BLOCK - 1) // BLOCK)[None, :]
        inside = (i * BLOCK < seq.nq) & (j * BLOCK < seq.nk)
        flags = mask.blocks + seq.entry.to(tl.int64) * mask.blocks_batch
        flags += h.to(tl.int64) * mask.blocks_head
        flag = tl.load(flags + i.to(tl.int64) * mask.blocks_row + j, mask=inside, other=0)
        some = some & (tl.max(tl.max(flag.to(tl.int32), 1), 0) > 0)
    return some


@triton.jit
def visible(mask, bias, seq, h, i, j):
    """Whether query i sees key j, for i [M, 1] and j [1, N], or i [1, M] and j [N, 1]."""
    rows = i < seq.nq
    columns = j < seq.nk
    seen = rows & columns
    if mask.left is not None:
        seen = seen & (j - i >= seq.lo)
    if mask.right is not None:
        seen = seen & (j - i <= seq.hi)
    if mask.keep is not None:
        row = mask.keep + seq.entry.to(tl.int64) * mask.keep_row + seq.k0
        seen = seen & (tl.load(row + j, mask=columns, other=0) != 0)
    if mask.q_segments is not None:
        q_row = mask.q_segments + seq.entry.to(tl.int64) * mask.segments_q + seq.q0
        k_row = mask.k_segments + seq.entry.to(tl.int64) * mask.segments_k + seq.k0
        a = tl.load(q_row + i, mask=rows, other=0)
        b = tl.load(k_row + j, mask=columns, other=0)
        seen = seen & (a == b)
    if mask.blocks is not None:
        flags = mask.blocks + seq.entry.to(tl.int64) * mask.blocks_batch
        flags += h.to(tl.int64) * mask.blocks_head
        flag = flags + (i // BLOCK).to(tl.int64) * mask.blocks_row + j // BLOCK
        seen = seen & (tl.load(flag, mask=seen, other=0) != 0)
    if mask.dense is not None:
        seen = seen & (load_dense(mask.dense, seq, h, i, j, True) != 0)
    if bias is not None:
        seen = seen & (load_dense(bias, seq, h, i, j, True).to(tl.float32) > -INF)
    return seen


@triton.jit
def load_dense(dense, seq, h, i, j, EDGE: tl.constexpr):
    """The entries of a dense mask or bias; 0 outside the sequence, which only EDGE looks for."""
    base = dense.ptr + seq.entry.to(tl.int64) * dense.batch + h.to(tl.int64) * dense.head
    rows = base + (seq.q0 + i).to(tl.int64) * dense.row
    entry = rows + (seq.k0 + j).to(tl.int64) * dense.column
    if EDGE:
        return tl.load(entry, mask=(i < seq.nq) & (j < seq.nk), other=0)
    return tl.load(entry)


# ------------------------------------------------------------- scores and weights


@triton.jit
def tanh(x):
    """tanh in float32, to its last bits also near 0."""
    z = x * x
    near = -5.70498872745e-3 * z + 2.06390887954e-2  # minimax on |x| < 0.625 (Cephes, Moshier)
    near = near * z - 5.37397155531e-2
    near = near * z + 1.33314422036e-1
    near = near * z - 3.33332819422e-1
    near = near * z * x + x
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.math.exp2(size * (2.0 * LOG2E)) + 1.0)
    return tl.where(size < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def score(x, how, seq, h, i, j, EDGE: tl.constexpr, FOLD: tl.constexpr):
    """(score, slope of softcap there or 1) of x = q . k.

    FOLD: the score is x itself, in units of `scale`; for calls whose score is scale * x, scale > 0.
    """
    slope = 1.0
    if not FOLD:
        x = x * how.scale
        if how.softcap is not None:
            t = tanh(x * how.inverse_softcap)
            x = t * how.softcap
            slope = 1.0 - t * t
        if how.alibi is not None:
            steepness = tl.load(how.alibi + seq.entry * how.alibi_batch + h)
            x = x - steepness * tl.abs(j - i - seq.off).to(tl.float32)
        if how.bias is not None:
            x = x + load_dense(how.bias, seq, h, i, j, EDGE).to(tl.float32)
    return x, slope


@triton.jit
def kept(dropout, seq, h, i0, j0, M: tl.constexpr, N: tl.constexpr):
    """Which of the M x N weights from (i0, j0) on dropout keeps; j0 is a multiple of 4.

    Philox-4x32-10 with the counter (j // 4, i, h, b); its four words are those of keys j to j + 3.
    """
    seed = tl.load(dropout.seed)
    j4 = tl.broadcast_to((j0 // 4 + tl.arange(0, N // 4))[None, :], (M, N // 4))
    i = tl.broadcast_to((i0 + tl.arange(0, M))[:, None], (M, N // 4))
    r0, r1, r2, r3 = tl.philox(seed, j4, i, h, seq.number)
    bits = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), (M, N))
    return (bits >> 8).to(tl.int32) >= dropout.threshold


@triton.jit
def dot(a, b, acc, HOW: tl.constexpr):
    """acc + a @ b in float32.

    HOW: "ieee" or "tf32" for float32; "upcast" under Triton's interpreter, which would multiply
    bfloat16 as raw bits.
    """
    if HOW == "upcast":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=HOW)


@triton.jit
def narrow(x, TO: tl.constexpr, HOW: tl.constexpr):
    """The nearest numbers of a dtype to x in float32."""
    if HOW == "upcast":  # the interpreter cuts bits off; it is given what has none to lose
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    return x.to(TO)


@triton.jit
def dot_rounded(a, b, acc, WIDTH: tl.constexpr, HOW: tl.constexpr):
    """acc + a @ b for weights a in float32, which are rounded to b's dtype.

    WIDTH: columns of the whole result.  In a narrow one there is little that rounding could average
    out over, and matrix units have time to spare: what it took off is multiplied as well.
    """
    near = narrow(a, b.dtype, HOW)
    acc = dot(near, b, acc, HOW)
    if WIDTH <= NARROW and b.dtype != tl.float32:
        acc = dot(narrow(a - near.to(tl.float32), b.dtype, HOW), b, acc, HOW)
    return acc


@triton.jit
def dot_seen(a, b, acc, seen, WIDTH: tl.constexpr, HOW: tl.constexpr):
    """`dot_rounded` where NaN and infinity in b [K, N] reach the rows that see them, and no other.

    seen [M, K]: in plain arithmetic the weight 0 of what is hidden would make NaN of them.
    """
    wide = b.to(tl.float32)
    finite = tl.abs(wide) < INF
    acc = dot_rounded(a, tl.where(finite, wide, 0.0).to(b.dtype), acc, WIDTH, HOW)
    zero = tl.zeros_like(acc)
    up = ((wide == INF) | (wide != wide)).to(tl.float16)
    down = ((wide == -INF) | (wide != wide)).to(tl.float16)
    mark = seen.to(tl.float16)
    acc += tl.where(tl.dot(mark, up, zero) > 0.0, INF, 0.0)
    return acc + tl.where(tl.dot(mark, down, zero) > 0.0, -INF, 0.0)


@triton.jit
def load_tile(a, seq_row, row_limit, head_base, rows, columns, WIDTH: tl.constexpr,
              EDGE: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    """Rows `seq_row + rows` of an array [rows, columns], 0 at or past row_limit (where EDGE).

    head_base points to the batch entry and head.  PADDED: columns go past WIDTH, which gives 0.
    """
    entry = head_base + seq_row.to(tl.int64) * a.row + rows[:, None] * a.row + columns[None, :]
    if EDGE and PADDED:
        there = (rows[:, None] < row_limit) & (columns[None, :] < WIDTH)
        return tl.load(entry, mask=there, other=0.0)
    if EDGE:
        return tl.load(entry, mask=rows[:, None] < row_limit, other=0.0)
    if PADDED:
        return tl.load(entry, mask=columns[None, :] < WIDTH, other=0.0)
    return tl.load(entry)
