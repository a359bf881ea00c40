"""Which keys a query sees, as a small value: band, keep-vector, segments, blocks, dense tensor.

Masks combine with ``&`` (seen by both)::

    causal() & padding(lengths)
    (sliding_window(256, 0) | global_tokens(4)) & key_padding(keep)

Everywhere in this module True means *attend*.  Structured parts stay structured: kernels skip what
they exclude, and no [Lq, Lk] tensor is made for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit.spec import BLOCK

__all__ = [
    "Mask",
    "block_sparse",
    "causal",
    "documents",
    "from_dense",
    "global_tokens",
    "key_padding",
    "padding",
    "sliding_window",
]

_INF = float("inf")
_LARGEST = 2**31 - 1
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Band(NamedTuple):
    """Query i sees key j when ``i + off - left <= j <= i + off + right``; None is no limit."""

    left: int | None
    right: int | None


class Globals(NamedTuple):
    """Every pair whose query or key is one of the first tokens, and the pairs inside the band."""

    band: Band | None
    bottom_right: bool
    tokens: int


class Parts(NamedTuple):
    """A mask lowered for one call: the band of an AttentionSpec, the tensors of a TensorArgs."""

    left: int | None
    right: int | None
    bottom_right: bool
    keep: Tensor | None  # bool [B, Lk]
    lengths: Tensor | None  # int32 [B]
    q_segments: Tensor | None  # int32 [B, Lq]
    k_segments: Tensor | None  # int32 [B, Lk]
    blocks: Tensor | None  # bool [B|1, Hq|1, ceil(Lq/64), ceil(Lk/64)]
    dense: Tensor | None  # bool or float [B|1, Hq|1, Lq|1, Lk|1]


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Mask:
    """What a query sees.  Made by the functions of this module; frozen; combined with ``&``.

    A key is visible when every part that is present says so.  Bands of the two alignments are kept
    apart until the lengths are known.
    """

    start: Band | None = None  # aligned top-left: query 0 stands at key 0
    end: Band | None = None  # aligned bottom-right: the last query stands at the last key
    keep: Tensor | None = None
    lengths: Tensor | None = None
    q_segments: Tensor | None = None
    k_segments: Tensor | None = None
    blocks: Tensor | None = None
    dense: Tensor | None = None
    unions: tuple[Globals, ...] = ()

    def __and__(self, other: Mask) -> Mask:
        """Keys that both masks show.  Two dense floats add up; a bool hides entries of a float."""
        if not isinstance(other, Mask):
            raise TypeError(
                f"& joins a Mask with a Mask, but the right operand is {describe(other)}; "
                "a tensor becomes a mask by from_dense or key_padding"
            )
        q_segments, k_segments = self.q_segments, self.k_segments
        dense = _meet_dense(self.dense, other.dense)
        if q_segments is None:
            q_segments, k_segments = other.q_segments, other.k_segments
        elif other.q_segments is not None and other.k_segments is not None:
            same = other.q_segments[:, None, :, None] == other.k_segments[:, None, None, :]
            dense = _meet_dense(dense, same)
        return Mask(
            start=_meet_bands(self.start, other.start),
            end=_meet_bands(self.end, other.end),
            keep=_meet("keep vectors", torch.logical_and, self.keep, other.keep),
            lengths=_meet("lengths", torch.minimum, self.lengths, other.lengths),
            q_segments=q_segments,
            k_segments=k_segments,
            blocks=_meet("block patterns", torch.logical_and, self.blocks, other.blocks),
            dense=dense,
            unions=self.unions + other.unions,
        )

    def __rand__(self, other: Any) -> Mask:
        raise TypeError(
            f"& joins a Mask with a Mask, but the left operand is {describe(other)}; "
            "a tensor becomes a mask by from_dense or key_padding"
        )

    def __or__(self, other: Mask) -> Mask:
        """A band seen together with global tokens; no other union has a structure to keep."""
        for band, tokens in ((self, other), (other, self)):
            if (
                isinstance(other, Mask)
                and _is_band(band)
                and _is_global(tokens)
                and tokens.unions[0].band is None
            ):
                seen, is_end = band.start or band.end, band.end is not None
                return Mask(unions=(Globals(seen, is_end, tokens.unions[0].tokens),))
        raise TypeError(
            f"| joins one band (causal or sliding_window) with global_tokens, found "
            f"{self!r} | {other!r}; write any other union as a bool tensor for from_dense"
        )

    def __ror__(self, other: Any) -> Mask:
        raise TypeError(f"| joins a Mask with a Mask, but the left operand is {describe(other)}")

    def __repr__(self) -> str:
        parts = []
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                parts.append(f"{name}={describe(value)}")
            elif value is not None and value != ():
                parts.append(f"{name}={value}")
        return f"Mask({', '.join(parts)})"

    def to(self, device: torch.device | str) -> Mask:
        """The same mask with its tensors on `device`."""
        moved: dict[str, Any] = {
            name: value.to(device)
            for name in self.__slots__
            if isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **moved)

    def with_dense(self, dense: Tensor | None) -> Mask:
        """The same mask with another dense part."""
        return replace(self, dense=dense)

    def resolve(self, batch: int, heads: int, lq: int, lk: int, device: torch.device) -> Parts:
        """Lower the mask for a call with these sizes.

        A dense bool tensor that varies neither with the query nor with the head becomes part of
        `keep`.  Bands of both alignments become one top-left band, whose numbers may be negative.

        Raises:
            RuntimeError: a tensor of the mask has another device or a shape that does not fit.
        """
        dense, blocks, keep = self.dense, self.blocks, self.keep
        if (
            dense is blocks is keep is self.lengths is self.q_segments is None and not self.unions
        ):  # a band alone, the mask of most calls
            return Parts(*self._band(lq, lk), None, None, None, None, None, None)
        if dense is not None:
            dense = _fit_dense(dense, batch, heads, lq, lk)
        for union in self.unions:
            shown, grid = _lower_union(union, lq, lk, device)
            dense = _meet_dense(dense, shown)
            blocks = grid if blocks is None else blocks & grid
        if keep is not None:
            keep = _fit("keep (key_padding)", keep, (batch, lk))
        if dense is not None:
            row, dense = split_keep(dense, batch, lk)
            keep = row if keep is None else keep if row is None else keep & row
        left, right, bottom_right = self._band(lq, lk)
        parts = Parts(
            left,
            right,
            bottom_right,
            None if keep is None else keep.contiguous(),
            None if self.lengths is None else _fit("lengths (padding)", self.lengths, (batch,)),
            None if self.q_segments is None else _fit("q_ids", self.q_segments, (batch, lq)),
            None if self.k_segments is None else _fit("k_ids", self.k_segments, (batch, lk)),
            None if blocks is None else _fit_blocks(blocks, batch, heads, lq, lk),
            dense,
        )
        for name, tensor in zip(Parts._fields[3:], parts[3:], strict=True):
            if tensor is not None and tensor.device != device:
                raise RuntimeError(f"mask's {name} is on {tensor.device}, expected {device}")
        return parts

    def _band(self, lq: int, lk: int) -> tuple[int | None, int | None, bool]:
        if self.end is None:
            return (*(self.start or Band(None, None)), False)
        if self.start is None:
            return (*self.end, True)
        off = lk - lq
        left, right = self.end
        moved = Band(None if left is None else left - off, None if right is None else right + off)
        both = _meet_bands(self.start, moved)
        assert both is not None
        return (*both, False)


def causal(bottom_right: bool = False) -> Mask:
    """Query i sees keys j <= i, or j <= i + Lk - Lq with bottom_right (flash-attn's alignment)."""
    return sliding_window(None, 0, bottom_right)


def sliding_window(left: int | None, right: int | None, bottom_right: bool = False) -> Mask:
    """Query i sees keys i + off - left <= j <= i + off + right, bounds included: left + right + 1.

    Args:
        left: keys before the query's own position that are seen, 0 or more; None: all of them.
        right: keys after it, likewise; 0 is causal.
        bottom_right: off is Lk - Lq in place of 0, so that the last query stands at the last key.

    Raises:
        TypeError: left or right is not an int or None, or bottom_right not a bool.
        ValueError: left or right is negative.
    """
    for name, bound in (("left", left), ("right", right)):
        if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool)):
            raise TypeError(f"{name} is {describe(bound)}, expected an int or None (no limit)")
        if bound is not None and bound < 0:
            raise ValueError(f"{name} is {bound}, expected 0 or more, or None for no limit")
    if not isinstance(bottom_right, bool):
        raise TypeError(f"bottom_right is {describe(bottom_right)}, expected a bool")
    band = Band(left, right)
    return Mask(end=band) if bottom_right else Mask(start=band)


def padding(lengths: Tensor) -> Mask:
    """Sequence b has lengths[b] keys, and the keys from there on are padding.

    Args:
        lengths: integer tensor [B].  A length above Lk hides nothing, one below 1 hides every key;
            the values are not looked at (that would make a GPU wait).

    Raises:
        TypeError: not an integer tensor.
        ValueError: not one-dimensional.
    """
    _integers("lengths", lengths)
    if lengths.dim() != 1:
        raise ValueError(f"lengths has shape {_shape(lengths)}, expected (batch,)")
    if lengths.dtype == torch.int64:  # more than 31 bits would change the sign
        lengths = lengths.clamp(0, _LARGEST)
    return Mask(lengths=lengths.to(torch.int32))


def key_padding(keep: Tensor) -> Mask:
    """True marks a real key, False a padded one: right, left or scattered.

    This is the opposite of the `key_padding_mask` of torch.nn (and attnkit.nn) modules.

    Args:
        keep: bool tensor [B, Lk], or [1, Lk] or [Lk] for one that all sequences share.

    Raises:
        TypeError: not a bool tensor.
        ValueError: not of one or two dimensions.
    """
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        raise TypeError(f"keep is {describe(keep)}, expected a bool tensor (True = attend)")
    if keep.dim() not in (1, 2):
        raise ValueError(f"keep has shape {_shape(keep)}, expected (batch, keys) or (keys,)")
    return Mask(keep=keep[None] if keep.dim() == 1 else keep)


def documents(q_ids: Tensor, k_ids: Tensor | None = None) -> Mask:
    """Several documents in one sequence: a query sees the keys that have its own document's id.

    Args:
        q_ids: integer tensor [B, Lq], or [Lq] for one that all sequences share; ids fit in int32,
            which is checked on the CPU (on a GPU, and in a compiled graph, it is trusted).
        k_ids: integer tensor [B, Lk] or [Lk]; None: the same as q_ids.

    Raises:
        TypeError: not integer tensors.
        ValueError: not of one or two dimensions, or ids of more than 32 bits.
    """
    if k_ids is None:
        k_ids = q_ids
    for name, ids in (("q_ids", q_ids), ("k_ids", k_ids)):
        _integers(name, ids)
        if ids.dim() not in (1, 2):
            raise ValueError(
                f"{name} has shape {_shape(ids)}, expected (batch, length) or (length,)"
            )
        looked_at = ids.dtype == torch.int64 and ids.is_cpu and not torch.compiler.is_compiling()
        if looked_at and not bool((ids == ids.to(torch.int32)).all()):
            raise ValueError(
                f"{name} holds ids from {int(ids.min())} to {int(ids.max())}, expected ids that "
                "fit in int32: number the documents, torch.unique(..., return_inverse=True) does"
            )
    q, k = (t.to(torch.int32)[None] if t.dim() == 1 else t.to(torch.int32) for t in (q_ids, k_ids))
    return Mask(q_segments=q, k_segments=k)


def block_sparse(blocks: Tensor) -> Mask:
    """One flag per tile of 64 queries by 64 keys; tiles marked False are skipped altogether.

    Args:
        blocks: bool tensor [B or 1, Hq or 1, ceil(Lq/64), ceil(Lk/64)], or without the leading one
            or two dimensions.

    Raises:
        TypeError: not a bool tensor.
        ValueError: not of two to four dimensions.
    """
    if not isinstance(blocks, Tensor) or blocks.dtype != torch.bool:
        raise TypeError(f"blocks is {describe(blocks)}, expected a bool tensor (True = attend)")
    if not 2 <= blocks.dim() <= 4:
        raise ValueError(
            f"blocks has shape {_shape(blocks)}, expected (batch or 1, heads or 1, "
            f"query blocks, key blocks), or without the leading dimensions"
        )
    return Mask(blocks=blocks[(None,) * (4 - blocks.dim())])


def global_tokens(count: int) -> Mask:
    """The first `count` positions see every key and are seen by every query; nothing else is seen.

    Made for ``sliding_window(left, right) | global_tokens(count)``; with a bottom-right window the
    position of query i is i + Lk - Lq.  Lowered to a bool tensor [1, 1, Lq, Lk] for each call.

    Raises:
        TypeError: count is not an int.
        ValueError: count is negative.
    """
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"count is {describe(count)}, expected an int")
    if count < 0:
        raise ValueError(f"count is {count}, expected 0 or more")
    return Mask(unions=(Globals(None, False, count),))


def from_dense(mask: Tensor) -> Mask:
    """Any mask, as a tensor that broadcasts to [B, Hq, Lq, Lk].

    Args:
        mask: bool (True = attend), or floating point, which is added to the scores and may require
            a gradient.  Of up to four dimensions.

    Raises:
        TypeError: neither bool nor floating point.
        ValueError: more than four dimensions.
    """
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(
            f"mask is {describe(mask)}, expected a bool tensor (True = attend) or a floating-point "
            "tensor (added to the scores)"
        )
    if mask.dim() > 4:
        raise ValueError(
            f"mask has shape {_shape(mask)}, expected at most the four dimensions "
            "(batch, heads, queries, keys)"
        )
    return Mask(dense=mask[(None,) * (4 - mask.dim())])


def split_keep(dense: Tensor, batch: int, lk: int) -> tuple[Tensor | None, Tensor | None]:
    """(keep, dense): a 4-D mask as a keep-vector [B, Lk], or as it is; the other one is None.

    A bool mask that varies neither with the head nor with the query is a keep-vector.
    """
    _, heads, rows, _ = dense.shape
    if dense.dtype != torch.bool:
        return None, dense
    if heads == 1 == rows:
        keep = dense.flatten(1)
    elif (heads == 1 or (heads and dense.stride(1) == 0)) and (
        rows == 1 or (rows and dense.stride(2) == 0)
    ):
        keep = dense[:, 0, 0]
    else:
        return None, dense
    return (keep if keep.shape == (batch, lk) else keep.expand(batch, lk)).contiguous(), None


def describe(value: Any) -> str:
    """What an argument turned out to be, for an error message."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {_shape(value)}"
    return f"{type(value).__name__} {value!r}" if value is not None else "None"


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _integers(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype not in _INTEGERS:
        raise TypeError(f"{name} is {describe(tensor)}, expected an integer tensor")


def _is_band(mask: Mask) -> bool:
    bare = Mask(start=mask.start, end=mask.end)
    return (mask.start is None) != (mask.end is None) and _same_parts(mask, bare)


def _is_global(mask: Mask) -> bool:
    return len(mask.unions) == 1 and _same_parts(mask, Mask(unions=mask.unions))


def _same_parts(a: Mask, b: Mask) -> bool:
    return all(
        getattr(a, n) is getattr(b, n)
        for n in (
            "start", "end", "keep", "lengths", "q_segments", "blocks", "dense", "unions"
        )
    )  # fmt: skip


def _least(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def _meet_bands(a: Band | None, b: Band | None) -> Band | None:
    if a is None or b is None:
        return b if a is None else a
    return Band(_least(a.left, b.left), _least(a.right, b.right))


def _meet(what: str, join: Any, a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    _must_broadcast(what, a, b)
    met: Tensor = join(a, b)
    return met


def _meet_dense(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    _must_broadcast("dense masks", a, b)
    if a.dtype == torch.bool and b.dtype == torch.bool:
        return a & b
    if a.dtype == torch.bool:
        a, b = b, a
    return a.masked_fill(~b, -_INF) if b.dtype == torch.bool else a + b


def _must_broadcast(what: str, a: Tensor, b: Tensor) -> None:
    if any(m != n and m != 1 and n != 1 for m, n in zip(a.shape, b.shape, strict=True)):
        raise ValueError(
            f"the {what} joined by & have shapes {_shape(a)} and {_shape(b)}, expected shapes that "
            "broadcast"
        )


def _fit(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`tensor` as a contiguous one of `shape`, its batch stretched where it is 1."""
    if tensor.shape != shape:
        if tensor.shape[1:] != shape[1:] or tensor.shape[0] != 1:
            raise RuntimeError(f"mask's {name} has shape {_shape(tensor)}, expected {shape}")
        tensor = tensor.expand(shape)
    return tensor.contiguous()


def _fit_dense(dense: Tensor, batch: int, heads: int, lq: int, lk: int) -> Tensor:
    if any(n not in (1, m) for n, m in zip(dense.shape, (batch, heads, lq, lk), strict=True)):
        raise RuntimeError(
            f"mask has shape {_shape(dense)}, which does not broadcast to the expected "
            f"(batch, heads, queries, keys) = {(batch, heads, lq, lk)}"
        )
    return dense


def _fit_blocks(blocks: Tensor, batch: int, heads: int, lq: int, lk: int) -> Tensor:
    grid = (-(-lq // BLOCK), -(-lk // BLOCK))
    b, h = blocks.shape[:2]
    if b not in (1, batch) or h not in (1, heads) or blocks.shape[2:] != grid:
        raise RuntimeError(
            f"mask's blocks have shape {_shape(blocks)}, expected ({batch} or 1, {heads} or 1, "
            f"{grid[0]}, {grid[1]}) for {lq} queries and {lk} keys in blocks of {BLOCK}"
        )
    return blocks.contiguous()


def _lower_union(union: Globals, lq: int, lk: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The pairs that are seen, [1, 1, Lq, Lk], and the blocks that hold any of them."""
    off = lk - lq if union.bottom_right else 0
    i = torch.arange(lq, device=device)[:, None] + off
    j = torch.arange(lk, device=device)
    first_i = torch.arange(-(-lq // BLOCK), device=device)[:, None] * BLOCK + off
    first_j = torch.arange(-(-lk // BLOCK), device=device) * BLOCK
    shown = (i < union.tokens) | (j < union.tokens)
    grid = (first_i < union.tokens) | (first_j < union.tokens)
    if union.band is not None:
        left, right = union.band
        inside = torch.ones_like(shown)
        touched = torch.ones_like(grid)
        if left is not None:
            inside = inside & (j >= i - left)
            last_j = (first_j + BLOCK).clamp(max=lk) - 1
            touched = touched & (last_j >= first_i - left)
        if right is not None:
            inside = inside & (j <= i + right)
            last_i = (first_i + BLOCK).clamp(max=lq + off) - 1
            touched = touched & (first_j <= last_i + right)
        shown, grid = shown | inside, grid | touched
    return shown[None, None], grid[None, None]
