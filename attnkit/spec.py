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


BLOCK = 64  # rows and columns of one flag of TensorArgs.blocks
