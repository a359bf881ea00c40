"""Floating-point operations of attnkit's operators, for torch.utils.flop_counter.

Counted as for PyTorch's own attention: every query with every key of its sequence, whatever a mask
hides; two products forward, five backward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attnkit.spec import AttentionSpec, CacheArgs, TensorArgs

_CU_Q, _CU_K = (TensorArgs._fields.index(name) for name in ("cu_seqlens_q", "cu_seqlens_k"))
_TABLE = len(TensorArgs._fields + AttentionSpec._fields) + CacheArgs._fields.index("block_table")


def register(forward: Any, backward: Any, decode: Any, extend: Any = None) -> None:
    """Give the operators (packets) of a backend their formulae; None where there is none."""

    @register_flop_formula(forward, get_raw=True)
    def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> int:
        return _pairs(q, k, rest) * 2 * (q.shape[3] + v.shape[3])

    @register_flop_formula(decode, get_raw=True)
    def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> int:
        table = rest[_TABLE] if len(rest) > _TABLE else None  # defaults at the end are left out
        pages = 1 if table is None else table.shape[1]
        return _pairs(q, k, rest) * pages * 2 * (q.shape[3] + v.shape[3])

    if extend is not None:

        @register_flop_formula(extend, get_raw=True)
        def _(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, *rest: Any, **_: Any):  # type: ignore[no-untyped-def]
            table = rest[_TABLE]
            pages = 1 if table is None else table.shape[1]
            return _pairs(q, keys, rest) * pages * 2 * (q.shape[3] + values.shape[3])

    if backward is None:
        return

    @register_flop_formula(backward, get_raw=True)
    def _(dout: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> int:
        d, dv = q.shape[3], v.shape[3]
        # scores again, dp = dout v^T, dv = p^T dout, dq = ds k, dk = ds^T q
        return _pairs(q, k, rest[2:]) * 2 * (3 * d + 2 * dv)


def _pairs(q: Tensor, k: Tensor, tensors: Any) -> int:
    """How many scores there are."""
    batch, heads, lq, _ = q.shape
    cu_q, cu_k = tensors[_CU_Q], tensors[_CU_K]
    if cu_q is not None:
        counts = (cu.diff().tolist() for cu in (cu_q, cu_k))
        return heads * sum(a * b for a, b in zip(*counts, strict=True))
    return batch * heads * lq * k.shape[2]
