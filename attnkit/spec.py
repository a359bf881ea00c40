"""What a call asks for apart from q, k, v (AttentionSpec), and its further tensors (TensorArgs)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AttentionSpec(NamedTuple):
    """What one call asks for.  Hashable, without tensors: a constant to a compiled graph.

    Key j is visible to query i when ``i + off - left <= j <= i + off + right``, where ``off`` is
    0 (top-left) or ``Lk - Lq`` (bottom-right); ``None`` is unlimited.
    """

    scale: float
    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    softcap: float = 0.0  # 0 is off
    dropout_p: float = 0.0


class TensorArgs(NamedTuple):
    """The optional tensors of a call, in the one form that every backend takes.

    ======================== ==================== ==================================================
    field                    shape                meaning
    ======================== ==================== ==================================================
    bias                     [B, Hq, Lq, Lk]      added to the scores, or bool with True = attend;
                                                  expanded (stride 0) where it was broadcast
    sinks                    [Hq] fp32            one more logit per head, with no value behind it
    keep                     [B, Lk] bool         True = attend
    lengths                  [B] int32            keys at or past the length are hidden
    q_segments, k_segments   [B, Lq], [B, Lk]     int32; equal ids see each other
    blocks                   [B|1, Hq|1, ., .]    bool; one flag per 64 x 64 tile
    alibi                    [B|1, Hq] fp32       adds ``-slope * |i + off - j|``
    seed                     [] int64             of the dropout's Philox generator
    cu_seqlens_q, _k         [N + 1] int32        packed sequences; the batch dimension is then 1
    ======================== ==================== ==================================================
    """

    bias: Tensor | None = None
    sinks: Tensor | None = None
    keep: Tensor | None = None
    lengths: Tensor | None = None
    q_segments: Tensor | None = None
    k_segments: Tensor | None = None
    blocks: Tensor | None = None
    alibi: Tensor | None = None
    seed: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None


class CacheArgs(NamedTuple):
    """Where a cache holds its slots; the cache is k, v [N, Hkv, S, D|Dv], of N rows of S slots.

    Without block_table and batch_index row b is sequence b, and N is B.

    ================ ============== ================================================================
    field            shape          meaning
    ================ ============== ================================================================
    starts           [B] int32      slots before it are hidden (left padding)
    block_table      [B, W] int32   slot j is slot j % S of row (page) ``block_table[b, j // S]``
    batch_index      [B] int32      sequence b is row ``batch_index[b]``; not with a block_table
    k_scale, v_scale [N, Hkv, S]    fp32; of caches in int8 or float8_e4m3fn: what is stored, times
                                    its scale, is the value
    ================ ============== ================================================================
    """

    starts: Tensor | None = None
    block_table: Tensor | None = None
    batch_index: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class RotaryTables(NamedTuple):
    """By which angles new keys are rotated on their way into a cache, slot by slot."""

    cos: Tensor | None = None  # [slots, rotary_dim / 2], fp32 (fp64 for fp64 keys)
    sin: Tensor | None = None
    interleaved: bool = False  # pairs are (2 i, 2 i + 1), not (i, i + rotary_dim / 2)


NO_CACHE = CacheArgs()
NO_ROTARY = RotaryTables()

BLOCK = 64  # rows and columns of one flag of TensorArgs.blocks
