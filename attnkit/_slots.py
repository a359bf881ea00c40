"""Cache slots in plain PyTorch: where they lie, and how new keys and values get into them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnkit.spec import NO_CACHE, NO_ROTARY, CacheArgs, RotaryTables


def append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    cache: CacheArgs = NO_CACHE,
    rotary: RotaryTables = NO_ROTARY,
) -> None:
    """Write k, v [B, Hkv, n, .] into slots lengths[b] to lengths[b] + n - 1 of the cache, in place.

    Keys are rotated first, each by the angles of its slot; 8-bit caches get `quantise`d rows.

    Raises:
        RuntimeError: a slot that does not exist (checked on the CPU, before anything is written).
    """
    with torch.no_grad():
        slots = lengths.long()[:, None] + torch.arange(k.shape[2], device=k.device)
        rows = places(k_cache, slots, cache)
        if rotary.cos is not None and rotary.sin is not None:
            cos, sin = (t[slots][:, None] for t in (rotary.cos, rotary.sin))
            k = rotated(k, cos, sin, rotary.interleaved)
        for new, old, scale in ((k, k_cache, cache.k_scale), (v, v_cache, cache.v_scale)):
            if scale is None:
                _write(new.to(old.dtype), old, rows)
            else:
                stored, factor = quantise(new, old.dtype)
                _write(stored.view(torch.int8), old.view(torch.int8), rows)
                _write(factor, scale, rows)


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., D] as (int8 or float8_e4m3fn [..., D], fp32 scale [...]), whose product is nearly x.

    The largest magnitude of a vector becomes the largest number.  The scale of zeros is 0; that of
    a vector with NaN or infinity in it is NaN, so that it cannot pass for a good one.
    """
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    x = x.float()
    scale = x.abs().amax(-1) / largest
    scale = torch.where(scale.isfinite(), scale, math.nan)
    unit = torch.where(scale[..., None] > 0, x / scale[..., None], 0.0)
    unit = unit.round() if dtype == torch.int8 else unit
    return unit.clamp(-largest, largest).to(dtype), scale


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [..., D] with its first dimensions rotated by cos and sin [..., rotary_dim / 2].

    In the dtype of cos; leading dimensions broadcast.
    """
    turned, rest = x.to(cos.dtype).tensor_split((2 * cos.shape[-1],), -1)
    a, b = turned.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turned.chunk(2, -1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned, rest), -1)


def rotated_queries(q: Tensor, lengths: Tensor, step: int, rotary: RotaryTables) -> Tensor:
    """q [B, H, L, D] with query t of sequence b rotated as one at lengths[b] + t * step."""
    assert rotary.cos is not None
    assert rotary.sin is not None
    positions = lengths.long()[:, None] + step * torch.arange(q.shape[2], device=q.device)
    refuse(positions, positions >= len(rotary.cos), "positions of queries", len(rotary.cos) - 1)
    cos, sin = (t[positions][:, None] for t in (rotary.cos, rotary.sin))
    return rotated(q, cos, sin, rotary.interleaved).to(q.dtype)


def _write(new: Tensor, old: Tensor, at: tuple[Tensor, Tensor]) -> None:
    pages, rows = at
    old[pages, :, rows] = new.transpose(1, 2)


def places(
    t: Tensor, slots: Tensor, cache: CacheArgs, wanted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(row of the cache, slot in it), each [B, n], of slots [B, n]; 0, 0 of those not wanted."""
    wanted = torch.ones_like(slots, dtype=torch.bool) if wanted is None else wanted
    size, (batch, _) = t.shape[2], slots.shape
    table, index = cache.block_table, cache.batch_index
    if table is None:
        table = (torch.arange(batch, device=t.device) if index is None else index)[:, None]
    capacity = size * table.shape[1]
    refuse(slots, wanted & ((slots < 0) | (slots >= capacity)), "a slot", capacity - 1)
    slots = torch.where(wanted, slots, 0)
    pages = torch.where(wanted, table.long().gather(1, slots // max(size, 1)), 0)
    name = "batch_index" if cache.block_table is None else "block_table"
    refuse(pages, (pages < 0) | (wanted & (pages >= len(t))), name, len(t) - 1)
    return pages, slots % max(size, 1)


def refuse(found: Tensor, wrong: Tensor, name: str, most: int) -> None:
    """RuntimeError if there is something wrong, on the CPU: elsewhere a look would be a wait."""
    if found.is_cpu and not torch.compiler.is_compiling() and bool(wrong.any()):
        raise RuntimeError(f"{name} is {int(found[wrong][0])}, expected 0 to {most}")
