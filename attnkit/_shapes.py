"""Any leading dimensions, broadcast and flattened to the [B, H, L, D] of the backends."""

from __future__ import annotations

import math

from torch import Size, Tensor

from attnkit import _checks


def fit(q: Size, k: Size, v: Size) -> bool:
    """Whether 4-D shapes need no broadcasting: one batch size, one head count, sizes that match."""
    return len(k) == 4 and len(v) == 4 and k[:3] == v[:3] and q[:2] == k[:2] and q[3] == k[3]


def to_4d(
    query: Tensor, key: Tensor, value: Tensor, gqa: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """(q [B, Hq, L, E], k [B, H, S, E], v [B, H, S, Ev], shape of the scores).

    The last is [..., Hq, L, S] with as many dimensions as the caller gave.

    Raises:
        RuntimeError: too few dimensions, or shapes that do not fit.
    """
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        raise RuntimeError(
            "Expected query, key, and value to all be  at least 2 dimensional, but query has "
            f"{query.dim()} dimensions, key {key.dim()}, value {value.dim()}"
        )
    _checks.check_head_dim(query, key)
    _checks.check_lengths(key, value)
    n = max(query.dim(), key.dim(), value.dim())
    q, k, v = (_with_dims(t, max(n, 3)) for t in (query, key, value))
    q, k, v = _match_heads(q, k, v, gqa)
    lead = _broadcast_lead(q, k, v)
    scores = (*lead, q.shape[-3], q.shape[-2], k.shape[-2])[-n:]
    return _flatten(q, lead), _flatten(k, lead), _flatten(v, lead), scores


def mask_to_4d(mask: Tensor, scores: tuple[int, ...]) -> Tensor:
    """A mask that broadcasts to `scores`, as [B or 1, H or 1, L or 1, S or 1].

    Raises:
        RuntimeError: it does not broadcast.
    """
    _checks.check_broadcast("attn_mask", mask, scores)
    mask = _with_dims(mask, max(len(scores), 4))
    if mask.dim() == 4:
        return mask
    if all(n == 1 for n in mask.shape[:-3]):
        return mask.reshape(1, *mask.shape[-3:])
    mask = mask.expand(*scores[:-3], *mask.shape[-3:])
    return mask.reshape(math.prod(scores[:-3]), *mask.shape[-3:])


def _with_dims(t: Tensor, n: int) -> Tensor:
    """`t` with dimensions of size 1 in front, up to n."""
    return t if t.dim() == n else t[(None,) * (n - t.dim())]


def _match_heads(q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Head counts (dimension -3) as the kernels take them: those of k and v equal, dividing q's."""
    hq, hk, hv = q.shape[-3], k.shape[-3], v.shape[-3]
    if gqa:
        _checks.check_groups(hq, hk, "key")
        _checks.check_groups(hq, hv, "value")
        if hk != hv:
            k, v = k.repeat_interleave(hq // hk, -3), v.repeat_interleave(hq // hv, -3)
        return q, k, v
    if hk == hv and hk in (1, hq):
        return q, k, v  # one head of keys for all queries need not be stretched
    heads = next((h for h in (hq, hk, hv) if h != 1), 1)
    for name, h in (("query", hq), ("key", hk), ("value", hv)):
        if h not in (1, heads):
            raise RuntimeError(
                f"{name} has {h} heads, expected {heads} or 1: query, key and value have "
                f"{hq}, {hk} and {hv} heads, and enable_gqa is False"
            )
    q, k, v = (t.expand(*t.shape[:-3], heads, *t.shape[-2:]) for t in (q, k, v))
    return q, k, v


def _broadcast_lead(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    lead = []
    for sizes in zip(q.shape[:-3], k.shape[:-3], v.shape[:-3], strict=True):
        size = next((n for n in sizes if n != 1), 1)
        if any(n not in (1, size) for n in sizes):
            raise RuntimeError(
                "query, key and value have leading dimensions that do not broadcast: found "
                f"{tuple(q.shape[:-3])}, {tuple(k.shape[:-3])} and {tuple(v.shape[:-3])}, expected "
                "equal sizes or 1"
            )
        lead.append(size)
    return tuple(lead)


def _flatten(t: Tensor, lead: tuple[int, ...]) -> Tensor:
    """[..., H, L, D] stretched to the leading dimensions and made 4-D."""
    if t.shape[:-3] != lead:
        t = t.expand(*lead, *t.shape[-3:])
    return t if len(lead) == 1 else t.reshape(math.prod(lead), *t.shape[-3:])
