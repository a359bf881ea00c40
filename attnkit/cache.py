"""Keys and values of the tokens seen so far: a step costs O(cache), and nothing is recomputed."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from attnkit import functional


class KVCache:
    """A preallocated cache: token t of sequence b is in slot t; ``lengths[b]`` slots are filled.

    ========= ========================= =====================================================
    attribute shape                     meaning
    ========= ========================= =====================================================
    k, v      [B, Hkv, capacity, D|Dv]  written in place; slots past the length are never read
    lengths   [B] int32                 changed in place; no step reads it on the host
    keep      [B, capacity] bool | None True = attend; hides slots such as left padding
    ========= ========================= =====================================================

    The cache is for inference: a key that requires a gradient is refused.

    A full cache is noticed without reading the device.  The host keeps an upper bound of the
    longest length; it grows by n with each ``append`` of n tokens, and only when it says "full" are
    the true lengths read, once.  Inside a compiled graph nothing can be raised, and nothing is
    checked: call :meth:`check_room` for all the steps to come before the first of them.
    """

    def __init__(self, k: Tensor, v: Tensor, lengths: Tensor, keep: Tensor | None = None) -> None:
        if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
            raise ValueError(
                f"k and v are {tuple(k.shape)} and {tuple(v.shape)}, "
                "expected [B, Hkv, capacity, D] that differ in D alone"
            )
        _same_kind("v", v, k)
        batch, _, capacity, _ = k.shape
        _expect("lengths", lengths, torch.int32, (batch,))
        if keep is not None:
            _expect("keep", keep, torch.bool, (batch, capacity))
        self.k, self.v, self.lengths, self.keep = k, v, lengths, keep
        # upper bound of lengths.max(); None: the host does not know one
        self._longest: int | None = None

    @classmethod
    def allocate(
        cls,
        batch: int,
        heads: int,
        capacity: int,
        head_dim: int,
        v_head_dim: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> KVCache:
        """An empty cache of ``batch`` sequences, ``heads`` key/value heads, ``capacity`` tokens."""
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        k = torch.zeros(batch, heads, capacity, head_dim, **options)
        v = torch.zeros(batch, heads, capacity, v_head_dim or head_dim, **options)
        cache = cls(k, v, torch.zeros(batch, dtype=torch.int32, device=device))
        cache._longest = 0
        return cache

    @classmethod
    def like(cls, k: Tensor, v: Tensor, capacity: int, *, batch: int | None = None) -> KVCache:
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
            f"KVCache(batch={batch}, heads={heads}, capacity={capacity}, head_dim={dim}, "
            f"dtype={self.k.dtype})"
        )

    def check_room(self, n: int) -> None:
        """ValueError if a sequence has no room for n more tokens."""
        if self._longest is None or self._longest + n > self.capacity:
            self._longest = int(self.lengths.max()) if self.lengths.numel() else 0
            if self._longest + n > self.capacity:
                raise ValueError(
                    f"the cache is full: it holds {self._longest} of {self.capacity} tokens, "
                    f"and {n} more were given"
                )

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write k [B, Hkv, n, D] and v [B, Hkv, n, Dv] behind each sequence's tokens; count them.

        Raises before anything is written: ValueError for a full cache, another shape or device,
        TypeError for another dtype, RuntimeError for keys that require a gradient.
        """
        for name, new, old in (("k", k, self.k), ("v", v, self.v)):
            batch, heads, _, dim = old.shape
            if new.dim() != 4 or (*new.shape[:2], new.shape[3]) != (batch, heads, dim):
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
        if torch.compiler.is_compiling():
            self._longest = None  # reading it would make a new graph of every step
        else:
            self.check_room(n)
            assert self._longest is not None
            self._longest += n
        rows = torch.arange(k.shape[0], device=k.device)[:, None]  # [B, 1]
        slots = self.lengths[:, None] + torch.arange(n, device=k.device)  # [B, n]
        self.k.transpose(1, 2).index_put_((rows, slots), k.transpose(1, 2))
        self.v.transpose(1, 2).index_put_((rows, slots), v.transpose(1, 2))
        self.lengths.add_(n)

    def attend(self, query: Tensor, **options: Any) -> Tensor:
        """Attention of query [B, Hq, n, D] to the filled slots; the queries are the last n tokens.

        Query i of n sees the slots up to its own (bottom-right causal).  ``options`` are the scale
        and what else :func:`attnkit.functional.decode_attention` takes.
        """
        out = functional.decode_attention(
            query, self.k, self.v, self.lengths, keep=self.keep, **options
        )
        return cast(Tensor, out)

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row ``index[b]`` was (int [B]); rows may be repeated and dropped.

        In place.  An index of another length is a batch of another size, which takes new memory.
        """
        filled = self.capacity
        if not torch.compiler.is_compiling() and self._longest is not None:
            filled = self._longest  # what lies behind is never read and need not move
        index = index.to(self.k.device)
        if index.shape[0] == self.k.shape[0]:
            for old in (self.k[:, :, :filled], self.v[:, :, :filled], self.lengths, self.keep):
                if old is not None:
                    old.copy_(old.index_select(0, index))
        else:
            self.k, self.v = self.k.index_select(0, index), self.v.index_select(0, index)
            self.lengths = self.lengths.index_select(0, index)
            self.keep = None if self.keep is None else self.keep.index_select(0, index)

    def crop(self, lengths: Tensor | int) -> None:
        """Forget the tokens from ``lengths`` (one number, or [B]) on; shorter sequences stay."""
        if isinstance(lengths, int):
            if lengths < 0:
                raise ValueError(f"lengths is {lengths}, expected 0 or more")
            self.lengths.clamp_(max=lengths)
            if not torch.compiler.is_compiling() and self._longest is not None:
                self._longest = min(self._longest, lengths)
        else:
            self.lengths.copy_(torch.minimum(self.lengths, lengths.to(self.lengths)).clamp_(min=0))

    def clear(self) -> None:
        """Forget all tokens; the memory stays."""
        self.lengths.zero_()
        self._longest = 0


def _expect(name: str, found: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if found.dtype != dtype or found.shape != shape:
        raise ValueError(f"{name} is {found.dtype} {tuple(found.shape)}, expected {dtype} {shape}")


def _same_kind(name: str, new: Tensor, old: Tensor) -> None:
    if new.dtype != old.dtype:
        raise TypeError(f"{name} is {new.dtype}, the cache holds {old.dtype}")
    if new.device != old.device:
        raise ValueError(f"{name} is on {new.device}, the cache is on {old.device}")
