"""A cache in pages: sequences of any lengths share one memory, and the prefixes they have alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from attnkit import dispatch, functional
from attnkit.masks import describe
from attnkit.spec import CacheArgs, RotaryTables

_STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class PagedKVCache:
    """Slot t of sequence s is slot ``t % page_size`` of page ``block_table[s, t // page_size]``.

    =========== ============================= ================================================
    attribute   shape                         meaning
    =========== ============================= ================================================
    k, v        [pages, Hkv, page_size, D|Dv] written in place; slots past a length never count
    k_scale,    [pages, Hkv, page_size] fp32  of a quantised cache, else None
    v_scale
    lengths     [max_sequences] int32         tokens of each sequence
    block_table [max_sequences, max_pages_    the pages of each sequence; what lies behind them
                per_sequence] int32           means nothing
    =========== ============================= ================================================

    Sequences are known by ids, ``0 <= id < max_sequences``.  Which pages are whose is kept on the
    host.  A page may belong to several sequences, which `fork` makes of one; the first of them to
    write to it gets a copy of its own (Kwon et al.: Efficient Memory Management for Large Language
    Model Serving with PagedAttention, 2023).  A method that raises has changed nothing.

    Inside a compiled graph no page can be taken: call `reserve` for all the steps to come before
    the first of them, and again after a `fork`.

    For inference: keys are stored as they are given, or rotated on their way, without a gradient.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        scales: tuple[Tensor, Tensor] | None,
        max_sequences: int,
        max_pages_per_sequence: int,
    ) -> None:
        self.k, self.v = k, v
        self.k_scale: Tensor | None
        self.v_scale: Tensor | None
        self.k_scale, self.v_scale = (None, None) if scales is None else scales
        options: dict[str, Any] = {"dtype": torch.int32, "device": k.device}
        self.lengths = torch.zeros(max_sequences, **options)
        self.block_table = torch.zeros(max_sequences, max_pages_per_sequence, **options)
        self._pages: dict[int, list[int]] = {}  # of each sequence in use
        self._tokens: list[int] | None = [0] * max_sequences  # None: a graph has counted on
        self._shares = [0] * k.shape[0]  # sequences that a page belongs to
        self._free = list(range(k.shape[0]))[::-1]
        self._idle = list(range(max_sequences))[::-1]

    @classmethod
    def allocate(
        cls,
        pages: int,
        page_size: int,
        heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        *,
        max_sequences: int,
        max_pages_per_sequence: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        quantize: str | None = None,
    ) -> PagedKVCache:
        """An empty cache.

        Args:
            pages: that all sequences share.
            page_size: slots of a page, 1 or more, any number.
            heads: of keys and values.
            head_dim, v_head_dim: width of keys, and of values if it is another.
            max_sequences: that may be in the cache at once.
            max_pages_per_sequence: bounds the length of a sequence.
            dtype: of keys and values; of no meaning if they are quantised.
            device: of everything.
            quantize: "int8" or "fp8" (float8_e4m3fn), with a scale per token and head; None: as
                they are.

        Raises:
            ValueError: a size below 1, or another word.
        """
        sizes = {
            "pages": pages,
            "page_size": page_size,
            "heads": heads,
            "max_sequences": max_sequences,
            "max_pages_per_sequence": max_pages_per_sequence,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}, expected 1 or more")
        if quantize is not None and quantize not in _STORED:
            raise ValueError(f"quantize is {quantize!r}, expected 'int8', 'fp8' or None")
        rows = (pages, heads, page_size)
        stored = dtype if quantize is None else _STORED[quantize]
        k, v = (
            torch.zeros(*rows, width, dtype=stored, device=device)
            for width in (head_dim, head_dim if v_head_dim is None else v_head_dim)
        )
        scales = None
        if quantize is not None:
            scales = (torch.zeros(rows, device=device), torch.zeros(rows, device=device))
        return cls(k, v, scales, max_sequences, max_pages_per_sequence)

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.k.shape[2]

    @property
    def free_pages(self) -> int:
        """Pages that belong to no sequence."""
        return len(self._free)

    def __repr__(self) -> str:
        pages, heads, size, dim = self.k.shape
        return (
            f"PagedKVCache(pages={pages}, page_size={size}, heads={heads}, head_dim={dim}, "
            f"dtype={self.k.dtype}, sequences={len(self._pages)}, free_pages={self.free_pages})"
        )

    def add(self, count: int = 1) -> list[int]:
        """Ids of ``count`` new, empty sequences.

        Raises:
            ValueError: there would be more than max_sequences.
        """
        if not 0 <= count <= len(self._idle):
            raise ValueError(
                f"count is {count}, expected 0 to {len(self._idle)}, which is what is left of "
                f"{self.lengths.shape[0]} sequences"
            )
        ids = [self._idle.pop() for _ in range(count)]
        self._pages.update((each, []) for each in ids)
        return ids

    def free(self, ids: Sequence[int]) -> None:
        """Forget these sequences; their pages are free where no other sequence shares them.

        Raises:
            ValueError: an id that is not in use, or twice the same.
        """
        tokens = self._known(ids)
        for each in ids:
            self._release(self._pages.pop(each))
            tokens[each] = 0
            self._idle.append(each)
        self._tell(ids)

    def fork(self, sequence: int, count: int = 1) -> list[int]:
        """Ids of ``count`` new sequences with the tokens of this one, whose pages they share.

        Raises:
            ValueError: an id that is not in use; there would be more than max_sequences.
        """
        tokens = self._known([sequence])
        ids = self.add(count)
        for each in ids:
            tokens[each] = tokens[sequence]
            self._pages[each] = self._share(sequence, tokens)
        self._tell(ids)
        return ids

    def reorder(self, sequences: Sequence[int], parents: Sequence[int]) -> None:
        """``sequences[i]`` gets the tokens that ``parents[i]`` has, for all at once, as beams do.

        A parent may be named several times, and need not be among the sequences.  No page is
        copied.

        Raises:
            ValueError: an id that is not in use, or twice the same sequence; another number of
                parents.
        """
        tokens = self._known(sequences)
        self._known(parents, distinct=False)
        if len(parents) != len(sequences):
            raise ValueError(f"parents has {len(parents)} ids, sequences has {len(sequences)}")
        counts = [tokens[parent] for parent in parents]
        pages = [self._share(parent, tokens) for parent in parents]
        for each, new, count in zip(sequences, pages, counts, strict=True):
            self._release(self._pages[each])
            self._pages[each], tokens[each] = new, count
        self._tell(sequences)

    def crop(self, sequences: Sequence[int], length: int) -> None:
        """Forget the tokens from ``length`` on; shorter sequences stay.

        Raises:
            ValueError: an id that is not in use, or twice the same; a length below 0.
        """
        tokens = self._known(sequences)
        if length < 0:
            raise ValueError(f"length is {length}, expected 0 or more")
        for each in sequences:
            tokens[each] = min(tokens[each], length)
            kept = self._count(tokens[each])
            self._release(self._pages[each][kept:])
            del self._pages[each][kept:]
        self._tell(sequences)

    def reserve(self, sequences: Sequence[int], n: int) -> None:
        """Take the pages that n more tokens of each of these sequences need.

        Raises:
            TypeError: n is no int.
            ValueError: n below 0; an id that is not in use, or twice the same; more tokens than
                max_pages_per_sequence allows; too few free pages.
        """
        if not isinstance(n, int) or isinstance(n, bool):
            raise TypeError(f"n is {describe(n)}, expected an int")
        if n < 0:
            raise ValueError(f"n is {n}, expected 0 or more tokens")
        tokens = self._known(sequences)
        width, size = self.block_table.shape[1], self.page_size
        released: Counter[int] = Counter()  # shares of pages that are to be replaced by copies
        copied: list[int] = []
        wanted = 0
        for each in sequences:
            used, pages = tokens[each], self._pages[each]
            if self._count(used + n) > width:
                raise ValueError(
                    f"sequence {each} has {used} tokens and {n} more were given, expected at most "
                    f"{width * size}, the slots of {width} pages"
                )
            wanted += max(self._count(used + n) - len(pages), 0)
            if n and used % size:
                last = pages[used // size]
                if self._shares[last] - released[last] > 1:
                    released[last] += 1
                    copied.append(each)
        if wanted + len(copied) > len(self._free):
            raise ValueError(
                f"{n} more tokens in each of {len(sequences)} sequences take "
                f"{wanted + len(copied)} pages, expected at most {len(self._free)}: the cache is "
                "full"
            )
        for each in copied:
            place = tokens[each] // size
            old, new = self._pages[each][place], self._take()
            for t in (self.k, self.v, self.k_scale, self.v_scale):
                if t is not None:
                    t[new].copy_(t[old])
            self._release([old])
            self._pages[each][place] = new
        for each in sequences:
            missing = self._count(tokens[each] + n) - len(self._pages[each])
            self._pages[each] += [self._take() for _ in range(missing)]
        if wanted or copied:
            self._tell(sequences)

    def append(
        self,
        k: Tensor,
        v: Tensor,
        sequences: Sequence[int],
        rotary: RotaryTables | tuple[Tensor, Tensor, bool] | None = None,
    ) -> None:
        """Write k [B, Hkv, n, D] and v [B, Hkv, n, Dv] behind the tokens of these B sequences.

        Args:
            k, v: the new tokens, in the dtype of the cache; for a quantised one in float32,
                bfloat16 or float16.
            sequences: ids, all different.
            rotary: cos and sin [positions, rotary_dim / 2], float32 (float64 for float64 keys), and
                whether pairs are interleaved: keys are rotated by the angles of their positions,
                in that precision, before they are rounded or quantised.

        Raises:
            TypeError: another dtype, or as `reserve`.
            ValueError: another shape or device, too short a table, or as `reserve`.
            RuntimeError: keys that require a gradient.
        """
        index, cache, tables = self._place(k, v, sequences, rotary)
        backend = dispatch.select_append(k, v, self.k, self.v)
        backend.append(k, v, self.k, self.v, self.lengths[index], cache, tables)
        self._add(k.shape[2], index, sequences)

    def extend(
        self,
        query: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: Sequence[int],
        rotary: RotaryTables | tuple[Tensor, Tensor, bool] | None = None,
        **options: Any,
    ) -> Tensor:
        """``append`` k, v and ``attend`` from the queries [B, Hq, n, D] that came with them.

        Args:
            query, k, v, sequences, rotary: as of `append` and `attend`; queries are not rotated.
            options: of `attend`.

        Raises what `append` does.
        """
        index, cache, tables = self._place(k, v, sequences, rotary)
        out = functional.extend_attention(
            query,
            k,
            v,
            self.k,
            self.v,
            self.lengths[index],
            block_table=cache.block_table,
            key_scale=cache.k_scale,
            value_scale=cache.v_scale,
            rotary=tables,
            **options,
        )
        self._add(k.shape[2], index, sequences)
        return cast(Tensor, out)

    def _place(
        self,
        k: Tensor,
        v: Tensor,
        sequences: Sequence[int],
        rotary: RotaryTables | tuple[Tensor, Tensor, bool] | None,
    ) -> tuple[Tensor, CacheArgs, RotaryTables]:
        """Pages for new tokens, which have been checked; what a backend is told of them."""
        self._check(k, v, len(sequences))
        tables = RotaryTables() if rotary is None else RotaryTables(*rotary)
        n = k.shape[2]
        if not torch.compiler.is_compiling():
            longest = max((self._known(sequences)[each] for each in sequences), default=0)
            self._check_tables(tables, longest + n, k)
            self.reserve(sequences, n)
        index = self._index(sequences)
        cache = CacheArgs(None, self.block_table[index], None, self.k_scale, self.v_scale)
        return index, cache, tables

    def _add(self, n: int, index: Tensor, sequences: Sequence[int]) -> None:
        """Count n tokens that were written."""
        self.lengths.index_add_(0, index, torch.full_like(index, n, dtype=torch.int32))
        if torch.compiler.is_compiling():
            self._tokens = None
        elif self._tokens is not None:
            for each in sequences:
                self._tokens[each] += n

    def attend(self, query: Tensor, sequences: Sequence[int], **options: Any) -> Tensor:
        """Attention of query [B, Hq, n, D] to these B sequences; the queries are their last tokens.

        Query i of n sees the slots up to its own.  ``options`` are ``starts``, the scale and what
        else :func:`attnkit.functional.decode_attention` takes.  An id may be named twice.

        Raises:
            ValueError: an id that is not in use.
        """
        if not torch.compiler.is_compiling():
            self._known(sequences, distinct=False)
        index = self._index(sequences)
        out = functional.decode_attention(
            query,
            self.k,
            self.v,
            self.lengths[index],
            block_table=self.block_table[index],
            key_scale=self.k_scale,
            value_scale=self.v_scale,
            **options,
        )
        return cast(Tensor, out)

    def _index(self, sequences: Sequence[int]) -> Tensor:
        return torch.tensor(sequences, dtype=torch.int64, device=self.lengths.device)

    def _count(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def _known(self, ids: Sequence[int], distinct: bool = True) -> list[int]:
        """The number of tokens of every sequence, if these ids are in use."""
        for each in ids:
            if each not in self._pages:
                raise ValueError(f"sequence {each} is not in use, expected an id that add() gave")
        if distinct and len(set(ids)) != len(ids):
            twice = next(each for each in ids if list(ids).count(each) > 1)
            raise ValueError(f"sequence {twice} is named twice, expected different ids")
        if self._tokens is None:
            self._tokens = cast("list[int]", self.lengths.tolist())
        return self._tokens

    def _take(self) -> int:
        page = self._free.pop()
        self._shares[page] = 1
        return page

    def _share(self, sequence: int, tokens: list[int]) -> list[int]:
        """The pages that hold the tokens of a sequence, for one more owner."""
        pages = self._pages[sequence][: self._count(tokens[sequence])]
        for page in pages:
            self._shares[page] += 1
        return pages

    def _release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._shares[page] -= 1
            if not self._shares[page]:
                self._free.append(page)

    def _tell(self, ids: Sequence[int]) -> None:
        """Bring the tensors up to date with what the host knows of these sequences."""
        if not ids or self._tokens is None:
            return
        width = self.block_table.shape[1]
        pages = [self._pages.get(each, []) for each in ids]
        rows = torch.tensor([each + [0] * (width - len(each)) for each in pages])
        counts = torch.tensor([self._tokens[each] for each in ids])
        index = self._index(ids)
        self.block_table[index] = rows.to(self.block_table)
        self.lengths[index] = counts.to(self.lengths)

    def _check(self, k: Tensor, v: Tensor, batch: int) -> None:
        for name, new, old in (("k", k, self.k), ("v", v, self.v)):
            _, heads, _, dim = old.shape
            if new.dim() != 4 or (*new.shape[:2], new.shape[3]) != (batch, heads, dim):
                raise ValueError(
                    f"{name} is {tuple(new.shape)}, expected [{batch}, {heads}, n, {dim}]"
                )
            if new.device != old.device:
                raise ValueError(f"{name} is on {new.device}, the cache is on {old.device}")
            quantised = (torch.float32, torch.bfloat16, torch.float16)
            wanted = (old.dtype,) if self.k_scale is None else quantised
            if new.dtype not in wanted or new.dtype != k.dtype:
                names = " or ".join(map(str, wanted))
                raise TypeError(f"{name} is {new.dtype}, expected {names}, k and v alike")
            if new.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"{name} requires a gradient, which a cache cannot carry: "
                    "append under torch.no_grad()"
                )
        if v.shape[2] != k.shape[2]:
            raise ValueError(f"v has {v.shape[2]} tokens, k has {k.shape[2]}")

    @staticmethod
    def _check_tables(tables: RotaryTables, positions: int, k: Tensor) -> None:
        real = torch.promote_types(k.dtype, torch.float32)
        if (tables.cos is None) != (tables.sin is None):
            raise ValueError("cos and sin belong together, and one of them is missing")
        for name, t in (("cos", tables.cos), ("sin", tables.sin)):
            if t is None:
                continue
            if t.dtype != real:
                raise TypeError(f"{name} is {t.dtype}, expected {real}")
            fits = t.dim() == 2 and 2 * t.shape[1] <= k.shape[3] and t.shape[0] >= positions
            if not fits or tables.cos is None or t.shape != tables.cos.shape:
                raise ValueError(
                    f"{name} is {tuple(t.shape)}, expected [positions, rotary_dim / 2], of at "
                    f"least {positions} positions and at most {k.shape[3]} dimensions"
                )
            if t.device != k.device:
                raise ValueError(f"{name} is on {t.device}, k is on {k.device}")
