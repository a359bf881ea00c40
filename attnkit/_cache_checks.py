"""What a call on a cache asks of it, at the door, beside what `_checks` asks of every call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attnkit import _checks
from attnkit.masks import describe
from attnkit.spec import CacheArgs

EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)


def ordinary(q: Any, k: Any, v: Any, key: Any, value: Any, lengths: Any) -> bool:
    """The quick look: whether queries, new tokens and a cache are of one kind and fit together.

    They are q [B, Hq, Lq, D], k, v [B, Hkv, n, .] and key, value [B, Hkv, S, .].  False only means
    that the other checks have to look closer.
    """
    if not (
        _checks.plain(q, k, v)
        and type(key) is type(value) is type(lengths) is Tensor
        and q.dtype is key.dtype is value.dtype
        and lengths.dtype is torch.int32
        and (
            (key.is_cpu and value.is_cpu and lengths.is_cpu)
            if q.is_cpu
            else key.device == value.device == lengths.device == q.device
        )
    ):
        return False
    qs, ks, vs = q.shape, k.shape, v.shape
    held, valued = key.shape, value.shape
    if not len(qs) == len(ks) == len(vs) == len(held) == len(valued) == 4:
        return False
    batch, heads, _, dim = qs
    _, groups, slots, _ = held
    n, wide = ks[2], vs[3]
    return (
        held == (batch, groups, slots, dim)
        and valued == (batch, groups, slots, wide)
        and ks == (batch, groups, n, dim)
        and vs == (batch, groups, n, wide)
        and groups > 0
        and dim > 0
        and heads % groups == 0
        and lengths.shape == (batch,)
    )


def quantised(key: Any, cache: CacheArgs) -> bool:
    """Whether the call means a quantised cache, rightly or not."""
    scaled = cache.k_scale is not None or cache.v_scale is not None
    return scaled or (isinstance(key, Tensor) and key.dtype in EIGHT_BITS)


def check_scales(q: Tensor, key: Any, value: Any, cache: CacheArgs) -> None:
    """Check a quantised cache [N, Hkv, S, .] and its scales for settled queries.

    Raises:
        TypeError: not tensors, or of another dtype.
        RuntimeError: shapes or devices that do not fit.
    """
    scales = (("key", key, cache.k_scale), ("value", value, cache.v_scale))
    for name, t, scale in scales:
        if not isinstance(t, Tensor) or t.dtype not in EIGHT_BITS or t.dtype != key.dtype:
            raise TypeError(
                f"cache_{name} is {describe(t)}, expected int8 or float8_e4m3fn, keys and values "
                "alike, with key_scale and value_scale"
            )
        if t.device != q.device:
            raise RuntimeError(f"cache_{name} is on {t.device}, query is on {q.device}")
        _checks.per_sequence(f"{name}_scale", scale, torch.float32, tuple(t.shape[:3]), q)
    if q.dtype == torch.float64:
        raise TypeError(
            "query is torch.float64, expected float32, bfloat16 or float16 for a quantised cache"
        )


def check_rows(q: Tensor, key: Tensor, value: Tensor, cache: CacheArgs) -> int:
    """The slots of a sequence, if q [B, Hq, Lq, D] and the cache [N, Hkv, S, .] fit together.

    Raises:
        TypeError: a tensor of `cache` has another dtype.
        ValueError: both block_table and batch_index.
        RuntimeError: shapes or devices that do not fit.
    """
    table, index = cache.block_table, cache.batch_index
    if cache.starts is not None:
        _checks.per_sequence("starts", cache.starts, torch.int32, (q.shape[0],), q)
    if table is None and index is None:
        _checks.check_sizes(q, key, value)
        return key.shape[2]
    if table is not None and index is not None:
        raise ValueError("block_table and batch_index are both given, expected one of them")
    for name, t in (("query", q), ("cache_key", key), ("cache_value", value)):
        if t.dim() != 4:
            raise RuntimeError(f"{name} has shape {tuple(t.shape)}, expected 4 dimensions")
    if key.shape[:3] != value.shape[:3]:
        raise RuntimeError(
            f"cache_value has rows, heads and slots {tuple(value.shape[:3])}, cache_key has "
            f"{tuple(key.shape[:3])}"
        )
    _checks.check_head_dim(q, key)
    _checks.check_groups(q.shape[1], key.shape[1], "cache_key")
    if index is not None:
        _checks.per_sequence("batch_index", index, torch.int32, (q.shape[0],), q)
        return key.shape[2]
    if isinstance(table, Tensor) and table.dim() != 2:
        raise RuntimeError(
            f"block_table has shape {tuple(table.shape)}, expected ({q.shape[0]}, pages of a "
            "sequence)"
        )
    width = table.shape[1] if isinstance(table, Tensor) else 0
    _checks.per_sequence("block_table", table, torch.int32, (q.shape[0], width), q)
    return width * key.shape[2]


def check_new(q: Tensor, k: Any, v: Any, k_cache: Tensor, v_cache: Tensor) -> None:
    """Check new tokens k [B, Hkv, n, D], v [B, Hkv, n, Dv] for a cache that fits the queries.

    Raises:
        TypeError: not tensors, or of another dtype.
        RuntimeError: shapes or devices that do not fit.
    """
    if type(k) is type(v) is Tensor and k.dim() == 4:
        batch, heads, n = q.shape[0], k_cache.shape[1], k.shape[2]
        if (
            k.shape == (batch, heads, n, q.shape[3])
            and v.shape == (batch, heads, n, v_cache.shape[3])
            and k.dtype is v.dtype is k_cache.dtype
            and k.device == v.device == q.device
        ):
            return
    kinds = [k_cache.dtype]
    if k_cache.dtype in EIGHT_BITS:
        kinds = [torch.float32, torch.bfloat16, torch.float16]
    for name, t, cache in (("key", k, k_cache), ("value", v, v_cache)):
        if not isinstance(t, Tensor) or t.dtype not in kinds or t.dtype != k.dtype:
            names = " or ".join(map(str, kinds))
            raise TypeError(f"{name} is {describe(t)}, expected {names}, key and value alike")
        tokens = k.shape[2] if k.dim() == 4 else "n"
        wanted = (q.shape[0], cache.shape[1], tokens, cache.shape[3])
        if tuple(t.shape) != wanted:
            expected = ", ".join(map(str, wanted))
            raise RuntimeError(f"{name} has shape {tuple(t.shape)}, expected ({expected})")
        if t.device != q.device:
            raise RuntimeError(f"{name} is on {t.device}, query is on {q.device}")


def row_index(index: Any) -> Tensor:
    """Which old row each new row is; its values are not looked at.

    Raises:
        TypeError: not an integer tensor.
        ValueError: not one-dimensional.
    """
    if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"index is {describe(index)}, expected an int64 or int32 tensor")
    if index.dim() != 1:
        raise ValueError(f"index has shape {tuple(index.shape)}, expected (rows,)")
    return index


@contextmanager
def rows_exist(index: Tensor, rows: int) -> Iterator[None]:
    """An error that torch raises on the CPU for a row that there is not, in words of our own."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if not index.is_cpu or not bool(((index < 0) | (index >= rows)).any()):
            raise
        found = f"index is {index.tolist()}, expected rows from 0 to {rows - 1}"
        raise IndexError(found) from error


def kept_lengths(lengths: Any, batch: int) -> None:
    """Check how many tokens a crop keeps: one number for all sequences, or [B].

    Raises:
        TypeError: neither an int nor an integer tensor.
        ValueError: below 0, or another shape.
    """
    if isinstance(lengths, Tensor) and lengths.dtype in (torch.int32, torch.int64):
        if tuple(lengths.shape) not in ((), (batch,)):
            raise ValueError(f"lengths has shape {tuple(lengths.shape)}, expected ({batch},)")
    elif not isinstance(lengths, int) or isinstance(lengths, bool):
        raise TypeError(f"lengths is {describe(lengths)}, expected an int or an int32 tensor")
    elif lengths < 0:
        raise ValueError(f"lengths is {lengths}, expected 0 or more")
