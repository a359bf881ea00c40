"""Keys and values of the tokens seen so far: a step costs O(cache), and nothing is recomputed.

:class:`KVCache` holds all tokens, :class:`RingKVCache` the last ones, for sliding windows.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from attnkit import _cache_checks, functional, masks
from attnkit._paged import PagedKVCache as PagedKVCache

T = TypeVar("T", bound="_Cache")


class _Cache:
    """What both caches are: slots for keys and values, and how many tokens each row has had."""

    def __init__(self, k: Tensor, v: Tensor, lengths: Tensor) -> None:
        if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
            raise ValueError(
                f"k and v are {tuple(k.shape)} and {tuple(v.shape)}, "
                "expected [B, Hkv, capacity, D] that differ in D alone"
            )
        _same_kind("v", v, k)
        _expect("lengths", lengths, torch.int32, (k.shape[0],))
        self.k, self.v, self.lengths = k, v, lengths
        # what the host knows of the lengths without reading them: an upper bound, or None, and
        # whether every sequence has exactly that many
        self._longest: int | None = None
        self._even = False

    @classmethod
    def allocate(
        cls: type[T],
        batch: int,
        heads: int,
        capacity: int,
        head_dim: int,
        v_head_dim: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> T:
        """An empty cache of ``batch`` sequences, ``heads`` key/value heads, ``capacity`` slots."""
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        k = torch.zeros(batch, heads, capacity, head_dim, **options)
        v = torch.zeros(batch, heads, capacity, v_head_dim or head_dim, **options)
        cache = cls(k, v, torch.zeros(batch, dtype=torch.int32, device=device))
        cache.clear()
        return cache

    @classmethod
    def like(cls: type[T], k: Tensor, v: Tensor, capacity: int, *, batch: int | None = None) -> T:
        """An empty cache for keys and values such as k [B, Hkv, n, D] and v [B, Hkv, n, Dv].

        Heads, sizes, dtype and device are theirs, so that a half-precision model, or one under
        autocast, gets a half-precision cache; so is the batch size, unless ``batch`` gives another.
        """
        return cls.allocate(
            k.shape[0] if batch is None else batch,
            k.shape[1],
            capacity,
            k.shape[3],
            v.shape[3],
            dtype=k.dtype,
            device=k.device,
        )

    @property
    def capacity(self) -> int:
        """Slots per sequence."""
        return self.k.shape[2]

    def __repr__(self) -> str:
        batch, heads, capacity, dim = self.k.shape
        return (
            f"{type(self).__name__}(batch={batch}, heads={heads}, capacity={capacity}, "
            f"head_dim={dim}, dtype={self.k.dtype})"
        )

    def clear(self) -> None:
        """Forget all tokens; the memory stays."""
        self.lengths.zero_()
        # only on the CPU: a captured CUDA graph must not hold the number of a slot
        self._longest, self._even = 0, self.k.device.type == "cpu"

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row ``index[b]`` was (int [B]); rows may be repeated and dropped.

        In place.  An index of another length is a batch of another size, which takes new memory.

        Raises:
            TypeError, ValueError: no integer tensor of one dimension.
            IndexError: a row that there is not (on the CPU; on a GPU it is trusted).
        """
        filled = self.capacity
        if not torch.compiler.is_compiling() and self._longest is not None:
            filled = self._longest  # what lies behind is never read and need not move
        index = _cache_checks.row_index(index).to(self.k.device)
        if torch.compiler.is_compiling():
            self._reorder(index, filled)
        else:
            with _cache_checks.rows_exist(index, self.k.shape[0]):
                self._reorder(index, filled)

    def _reorder(self, index: Tensor, filled: int) -> None:
        if index.shape[0] == self.k.shape[0]:
            for old in (self.k[:, :, :filled], self.v[:, :, :filled]):
                old.copy_(old.index_select(0, index))
        else:
            self.k, self.v = self.k.index_select(0, index), self.v.index_select(0, index)
        self.lengths = _reordered(self.lengths, index)

    def _check(self, k: Tensor, v: Tensor, counts: Tensor | None) -> int:
        """The number of new tokens n, if k, v and counts are what an ``append`` takes."""
        for name, new, old in (("k", k, self.k), ("v", v, self.v)):
            batch, heads, _, dim = old.shape
            shape = new.shape
            if len(shape) != 4 or shape[0] != batch or shape[1] != heads or shape[3] != dim:
                raise ValueError(
                    f"{name} is {tuple(new.shape)}, expected [{batch}, {heads}, n, {dim}]"
                )
            _same_kind(name, new, old)
            if new.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"{name} requires a gradient, which a cache cannot carry: "
                    "append under torch.no_grad()"
                )
        n = k.shape[2]
        if v.shape[2] != n:
            raise ValueError(f"v has {v.shape[2]} tokens, k has {n}")
        if counts is not None:
            _expect("counts", counts, torch.int32, (k.shape[0],))
            looked_at = counts.is_cpu and not torch.compiler.is_compiling()
            if looked_at and bool(((counts < 0) | (counts > n)).any()):
                raise ValueError(f"counts is {counts.tolist()}, expected 0 to {n}, the tokens")
        return n

    def _put(self, k: Tensor, v: Tensor, slots: Tensor | int) -> None:
        """Write n tokens into slots [B, n], or into n slots from one number on in every row."""
        n = k.shape[2]
        if isinstance(slots, int):
            self.k.narrow(2, slots, n).copy_(k)
            self.v.narrow(2, slots, n).copy_(v)
        else:
            rows = torch.arange(k.shape[0], device=k.device)[:, None]  # [B, 1]
            self.k.transpose(1, 2).index_put_((rows, slots), k.transpose(1, 2))
            self.v.transpose(1, 2).index_put_((rows, slots), v.transpose(1, 2))

    def _count(self, n: int, counts: Tensor | None) -> None:
        """Add the new tokens to the lengths, and to what the host knows of them."""
        self.lengths.add_(n if counts is None else counts)
        if torch.compiler.is_compiling():
            # reading them would make a new graph of every step
            self._longest, self._even = None, False
        else:
            self._longest = None if self._longest is None else self._longest + n
            self._even = self._even and counts is None


class KVCache(_Cache):
    """A preallocated cache: token t of sequence b is in slot t; ``lengths[b]`` slots are filled.

    ========= ========================= =====================================================
    attribute shape                     meaning
    ========= ========================= =====================================================
    k, v      [B, Hkv, capacity, D|Dv]  written in place; slots past the length are never read
    lengths   [B] int32                 changed in place, by methods; no step reads it on the host
    keep      [B, capacity] bool | None True = attend; hides slots such as left padding
    ========= ========================= =====================================================

    The cache is for inference: a key that requires a gradient is refused.  Keys are stored as they
    are given: rotated ones (RoPE) need no further turning.

    A full cache is noticed without reading the device.  The host keeps an upper bound of the
    longest length; it grows by n with each ``append`` of n tokens, and only when it says "full" are
    the true lengths read, once.  Inside a compiled graph nothing can be raised, and nothing is
    checked: call :meth:`check_room` for all the steps to come before the first of them.
    """

    def __init__(self, k: Tensor, v: Tensor, lengths: Tensor, keep: Tensor | None = None) -> None:
        super().__init__(k, v, lengths)
        if keep is not None:
            _expect("keep", keep, torch.bool, (k.shape[0], k.shape[2]))
        self.keep = keep

    def check_room(self, n: int) -> None:
        """ValueError if a sequence has no room for n more tokens."""
        if self._longest is None or self._longest + n > self.capacity:
            self._longest = int(self.lengths.max()) if self.lengths.numel() else 0
            if self._longest + n > self.capacity:
                raise ValueError(
                    f"the cache is full: it holds {self._longest} of {self.capacity} tokens, "
                    f"and {n} more were given"
                )

    def append(self, k: Tensor, v: Tensor, counts: Tensor | None = None) -> None:
        """Write k [B, Hkv, n, D] and v [B, Hkv, n, Dv] behind each sequence's tokens; count them.

        With counts (int32 [B]) only the first ``counts[b]`` of row b are tokens and the others
        padding, behind its length; all the same there must be room for n.

        Raises before anything is written: ValueError for a full cache, another shape or device,
        TypeError for another dtype, RuntimeError for keys that require a gradient.
        """
        self._write(k, v, counts)
        self._count(k.shape[2], counts)

    def attend(self, query: Tensor, **options: Any) -> Tensor:
        """Attention of query [B, Hq, n, D] to the filled slots; the queries are the last n tokens.

        Query i of n sees the slots up to its own (bottom-right causal).  ``options`` are the scale
        and what else :func:`attnkit.functional.decode_attention` takes.
        """
        return self._attend(query, self.lengths, **options)

    def extend(
        self,
        query: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        counts: Tensor | None = None,
        bias: Tensor | None = None,
        left: int | None = None,
        **options: Any,
    ) -> Tensor:
        """``append`` k, v and ``attend`` from the queries [B, Hq, n, D] that came with them.

        Args:
            query, k, v, counts: the new tokens; queries of padding have an output of no meaning.
            bias: float, broadcastable to [B, Hq, n, capacity], added to the scores.
            left: tokens before its own that a query sees; None: all of them.
            options: of ``attend``; with a bias, of :func:`attnkit.functional.attention`.

        Raises what `append` does.
        """
        tracing = torch.compiler.is_compiling()
        if not (options or tracing) and counts is bias is left is None:
            cache = self.k, self.v, self.lengths
            if _cache_checks.ordinary(query, k, v, *cache):
                self.check_room(k.shape[2])
                out = functional.extend_ordinary(query, k, v, *cache, self.keep)
                self._count(k.shape[2], None)
                return out
        if bias is not None:
            self._write(k, v, counts)
            out = self._attend_biased(query, bias, left, **options)
        elif tracing:  # which makes one kernel of the writing by itself
            self._write(k, v, counts)
            # the last queries may be padding, which is not kept
            out = self._attend(query, self.lengths + k.shape[2], left=left, **options)
        else:
            self.check_room(self._check(k, v, counts))
            found = functional.extend_attention(
                query, k, v, self.k, self.v, self.lengths, keep=self.keep, left=left, **options
            )
            out = cast(Tensor, found)
        self._count(k.shape[2], counts)
        return out

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row ``index[b]`` was (int [B]); rows may be repeated and dropped.

        In place.  An index of another length is a batch of another size, which takes new memory.

        Raises:
            TypeError, ValueError: no integer tensor of one dimension.
            IndexError: a row that there is not (on the CPU; on a GPU it is trusted).
        """
        super().reorder(index)
        if self.keep is not None:
            self.keep = _reordered(self.keep, index.to(self.keep.device))

    def crop(self, lengths: Tensor | int) -> None:
        """Forget the tokens from ``lengths`` (one number, or [B]) on; shorter sequences stay."""
        _cache_checks.kept_lengths(lengths, self.k.shape[0])
        if isinstance(lengths, int):
            self.lengths.clamp_(max=lengths)
            if not torch.compiler.is_compiling() and self._longest is not None:
                self._longest = min(self._longest, lengths)
        else:
            self.lengths.copy_(torch.minimum(self.lengths, lengths.to(self.lengths)).clamp_(min=0))
            self._even = False

    def _write(self, k: Tensor, v: Tensor, counts: Tensor | None) -> None:
        n = self._check(k, v, counts)
        if not torch.compiler.is_compiling():
            self.check_room(n)
            if self._even and self._longest is not None:
                return self._put(k, v, self._longest)
        return self._put(k, v, self._next(n))

    def _next(self, n: int) -> Tensor:
        """The slots [B, n] of the next n tokens."""
        return self.lengths[:, None] + torch.arange(n, device=self.lengths.device)

    def _attend(self, query: Tensor, lengths: Tensor, **options: Any) -> Tensor:
        out = functional.decode_attention(query, self.k, self.v, lengths, keep=self.keep, **options)
        return cast(Tensor, out)

    def _attend_biased(
        self, query: Tensor, bias: Tensor, left: int | None, **options: Any
    ) -> Tensor:
        own = self._next(query.shape[2])[..., None]  # [B, n, 1]
        slots = torch.arange(self.capacity, device=own.device)
        hidden = slots > own
        if left is not None:
            hidden = hidden | (slots < own - left)
        mask = None if self.keep is None else masks.key_padding(self.keep)
        bias = bias.masked_fill(hidden[:, None], -torch.inf)
        return functional.attention(query, self.k, self.v, mask=mask, bias=bias, **options)


class RingKVCache(_Cache):
    """The last ``capacity`` tokens, for a sliding window of that size: memory does not grow.

    Token t of sequence b is in slot ``t % capacity``, over what was there before; ``lengths[b]``
    counts all tokens so far.  A query sees its own token and the ``capacity - 1`` before it: what
    a :class:`KVCache` gives with ``left=capacity - 1``.  The order of slots is not that of tokens,
    so that position must be in the keys (rotated, for RoPE) and not in a bias.

    ========= ========================= =====================================================
    attribute shape                     meaning
    ========= ========================= =====================================================
    k, v      [B, Hkv, capacity, D|Dv]  written in place; slots not yet filled are never read
    lengths   [B] int32                 changed in place, by methods; no step reads it on the host
    starts    [B] int32 | None          hides the tokens before these, such as left padding
    ========= ========================= =====================================================

    For inference, as KVCache.  It is never full.  A single token costs one write; several at once
    (a prompt, of any length) a copy of the window.
    """

    def __init__(self, k: Tensor, v: Tensor, lengths: Tensor, starts: Tensor | None = None) -> None:
        super().__init__(k, v, lengths)
        if starts is not None:
            _expect("starts", starts, torch.int32, (k.shape[0],))
        self.starts = starts

    def append(self, k: Tensor, v: Tensor, counts: Tensor | None = None) -> None:
        """Keep k [B, Hkv, n, D] and v [B, Hkv, n, Dv] in place of the oldest tokens; count them.

        With counts (int32 [B]) only the first ``counts[b]`` of row b are tokens, the others are
        padding and not kept.

        Raises before anything is written: ValueError for another shape or device, TypeError for
        another dtype, RuntimeError for keys that require a gradient.
        """
        n = self._check(k, v, counts)
        if n == 1 and counts is None:
            self._put(k, v, self._slot())
        else:
            self._keep_last(*self._in_order(k, v), n, counts)
        self._count(n, counts)

    def attend(
        self,
        query: Tensor,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of query [B, Hq, 1, D], that of the last token, to the window that ends there.

        Raises:
            ValueError: several queries: the earlier ones' oldest keys are gone.  Use ``extend``.
        """
        if query.shape[2] != 1:
            raise ValueError(
                f"query has {query.shape[2]} tokens, expected 1: a ring has overwritten what the "
                "earlier ones see; use extend, which attends before it writes"
            )
        keep = None
        if self.starts is not None:
            last, slots = (
                self.lengths[:, None] - 1,
                torch.arange(self.capacity, device=query.device),
            )
            keep = last - (last - slots) % self.capacity >= self.starts[:, None]
        out = functional.decode_attention(
            query,
            self.k,
            self.v,
            self.lengths.clamp(max=self.capacity),
            keep=keep,
            causal=False,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        return cast(Tensor, out)

    def extend(
        self,
        query: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        counts: Tensor | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of the queries [B, Hq, n, D] that come with n new tokens, which are appended.

        Raises what `append` does.
        """
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
        n = self._check(k, v, counts)
        if n == 1 and counts is None:
            self.append(k, v)
            return self.attend(query, **options)
        keys, values = self._in_order(k, v)
        window = self.capacity
        # a sequence that has had fewer tokens than the window has negative ones in it
        tokens = self.lengths[:, None] + torch.arange(-window, n, device=k.device)
        keep = tokens >= (0 if self.starts is None else self.starts.clamp(min=0)[:, None])
        mask = masks.sliding_window(window - 1, 0, bottom_right=True) & masks.key_padding(keep)
        out = functional.attention(query, keys, values, mask=mask, **options)
        self._keep_last(keys, values, n, counts)
        self._count(n, counts)
        return out

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row ``index[b]`` was, as :meth:`KVCache.reorder` does it."""
        super().reorder(index)
        if self.starts is not None:
            self.starts = _reordered(self.starts, index.to(self.starts.device))

    def crop(self, lengths: Tensor | int) -> None:
        """Forget the tokens from ``lengths`` (one number, or [B]) on; shorter sequences stay.

        Raises:
            ValueError: a sequence has overwritten tokens that its window would show again.
        """
        _cache_checks.kept_lengths(lengths, self.k.shape[0])
        kept = torch.minimum(self.lengths, torch.as_tensor(lengths).to(self.lengths))
        if bool((kept < 0).any()):
            raise ValueError(f"lengths is {lengths}, expected 0 or more")
        if bool(((self.lengths > self.capacity) & (kept < self.lengths) & (kept > 0)).any()):
            raise ValueError(
                f"lengths is {lengths}, but the tokens are {self.lengths.tolist()} and the ring "
                f"holds the last {self.capacity}: what a shorter sequence sees was overwritten"
            )
        self.lengths.copy_(kept)
        self._longest, self._even = None, False

    def _slot(self) -> Tensor | int:
        if not torch.compiler.is_compiling() and self._even and self._longest is not None:
            return self._longest % self.capacity
        return (self.lengths % self.capacity)[:, None]

    def _in_order(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The window before the new tokens, oldest first, and these: [B, Hkv, capacity + n, D]."""
        ages = torch.arange(self.capacity, device=k.device)
        slots = (self.lengths[:, None] + ages) % self.capacity  # that of token lengths - capacity
        return (
            torch.cat((_take(self.k, slots), k), 2),
            torch.cat((_take(self.v, slots), v), 2),
        )

    def _keep_last(self, keys: Tensor, values: Tensor, n: int, counts: Tensor | None) -> None:
        """Fill every slot anew from tokens in order, of which n are new."""
        ends = self.lengths + (n if counts is None else counts)
        slots = torch.arange(self.capacity, device=keys.device)
        back = (ends[:, None] - 1 - slots) % self.capacity  # from the last token to the slot's
        places = self.capacity - 1 + (ends - self.lengths)[:, None] - back
        self.k.copy_(_take(keys, places))
        self.v.copy_(_take(values, places))


def _reordered(old: Tensor, index: Tensor) -> Tensor:
    new = old.index_select(0, index)
    return old.copy_(new) if new.shape == old.shape else new


def _take(x: Tensor, places: Tensor) -> Tensor:
    """x [B, H, S, D] at places [B, n] of each row."""
    index = places.long()[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, index)


def _expect(name: str, found: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if found.dtype != dtype or found.shape != shape:
        raise ValueError(f"{name} is {found.dtype} {tuple(found.shape)}, expected {dtype} {shape}")


def _same_kind(name: str, new: Tensor, old: Tensor) -> None:
    if new.dtype != old.dtype:
        raise TypeError(f"{name} is {new.dtype}, the cache holds {old.dtype}")
    if new.device != old.device:
        raise ValueError(f"{name} is on {new.device}, the cache is on {old.device}")
