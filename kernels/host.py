"""What the kernels share on the host: a call's tensors in the structures of parts.py."""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
from attnkit.kernels import launch
from attnkit.kernels.launch import INTERPRETED, Config
from attnkit.kernels.parts import (
    Array,
    Dense,
    Dropout,
    Mask,
    Score,
    Sizes,
    keep_range_kernel,
)

from attnkit.spec import AttentionSpec, TensorArgs

_TOGETHER = 1024  # packed sequences that are searched at once
_WIDEST_ROW = 1 << 23  # rows further apart are copied: a tile's offsets are 32-bit numbers


def laid_out(t: torch.Tensor) -> torch.Tensor:
    """`t`, copied where its strides are not what kernels take."""
    if (t.shape[-1] > 1 and t.stride(-1) != 1) or t.stride(-2) >= _WIDEST_ROW:
        return t.contiguous()
    return t


def array(t: torch.Tensor) -> Array:
    """A 4-D tensor whose last dimension is contiguous."""
    return Array(t, t.stride(0), t.stride(1), t.stride(2))


def dense(t: torch.Tensor) -> Dense:
    """A mask or bias [B, H, Lq, Lk] of any strides."""
    t = t.view(torch.uint8) if t.dtype == torch.bool else t
    return Dense(t, *t.stride())


def padded(n: int) -> int:
    """Columns of a tile for n columns of data: a power of two that a matrix product takes."""
    return max(16, triton.next_power_of_2(n))


def empty_like(q: torch.Tensor, last: int) -> torch.Tensor:
    """An empty [B, H, L, last] in q's layout: [B, L, H, .] memory where q has that."""
    b, h, n = q.shape[:3]
    if h > 1 and n > 1 and q.stride(1) < q.stride(2):
        return q.new_empty((b, n, h, last)).transpose(1, 2)
    return q.new_empty((b, h, n, last))


@lru_cache(maxsize=64)
def device_family(device: torch.device) -> str:
    """The rows of the launch table for a device."""
    if device.type == "cpu":
        return "ampere"
    amd = torch.version.hip is not None
    return launch.family(None if amd else torch.cuda.get_device_capability(device))


def precision(dtype: torch.dtype) -> str:
    """How products of float32 are taken, as PyTorch's own setting says."""
    if INTERPRETED and dtype == torch.bfloat16:
        return "upcast"
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 and not INTERPRETED else "ieee"


class Call:
    """One call in the terms of the kernels."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        args: TensorArgs,
        spec: AttentionSpec,
    ) -> None:
        self.tensors = tuple(laid_out(t) for t in (q, k, v))
        self.q, self.k, self.v = (array(t) for t in self.tensors)
        self.origin, self.args, self.spec = q, args, spec
        self.batch, self.q_heads, self.lq, self.d = q.shape
        self.kv_heads, self.lk, self.dv = k.shape[1], k.shape[2], v.shape[3]
        self.block_d, self.block_dv = padded(self.d), padded(self.dv)
        bias = args.bias is not None and args.bias.dtype != torch.bool
        self.float_bias = bias
        # then the score is a positive multiple of q . k, and needs no work of its own
        self.fold = spec.scale > 0 and spec.softcap == 0 and args.alibi is None and not bias

    @cached_property
    def masked(self) -> bool:
        """Whether anything may be hidden from a query."""
        parts = (self.args.bias, self.args.keep, self.args.lengths, self.args.q_segments)
        rest = (self.args.blocks, self.args.cu_seqlens_q, self.spec.left, self.spec.right)
        return any(t is not None for t in (*parts, *rest))

    @cached_property
    def mask(self) -> Mask:
        """The structured mask."""
        a, spec = self.args, self.spec
        keep = None if a.keep is None else a.keep.contiguous().view(torch.uint8)
        keep_range = None
        if keep is not None and a.cu_seqlens_q is None:
            keep_range = keep.new_empty((self.batch, 3), dtype=torch.int32)
            keep_range_kernel[(self.batch,)](keep, self.lk, keep_range, SIZE=1024)
        segments = a.q_segments is not None
        blocks = a.blocks
        if blocks is not None:
            blocks = (blocks if blocks.stride(3) == 1 else blocks.contiguous()).view(torch.uint8)
        cu_q, cu_k = (
            None if t is None else t.contiguous() for t in (a.cu_seqlens_q, a.cu_seqlens_k)
        )
        return Mask(
            left=clamped(spec.left, self.lq + self.lk),
            right=clamped(spec.right, self.lq + self.lk),
            bottom_right=1 if spec.bottom_right else None,
            lengths=None if a.lengths is None else a.lengths.contiguous(),
            keep=keep,
            keep_row=None if keep is None else self.lk,
            keep_range=keep_range,
            q_segments=a.q_segments.contiguous() if segments else None,
            k_segments=a.k_segments.contiguous() if segments else None,
            segments_q=self.lq if segments else None,
            segments_k=self.lk if segments else None,
            blocks=blocks,
            blocks_batch=None if blocks is None else _stride(blocks, 0),
            blocks_head=None if blocks is None else _stride(blocks, 1),
            blocks_row=None if blocks is None else blocks.stride(2),
            dense=None if a.bias is None or self.float_bias else dense(a.bias),
            cu_q=cu_q,
            cu_k=cu_k,
            sequences=None if cu_q is None else cu_q.shape[0] - 1,
        )

    @cached_property
    def score(self) -> Score:
        """What becomes of q . k."""
        cap = self.spec.softcap
        alibi = None if self.args.alibi is None else self.args.alibi.contiguous()
        return Score(
            scale=float(self.spec.scale),
            softcap=float(cap) if cap > 0 else None,
            inverse_softcap=1.0 / cap if cap > 0 else None,
            alibi=alibi,
            alibi_batch=None if alibi is None else _stride(alibi, 0),
            bias=dense(self.args.bias) if self.float_bias else None,
        )

    @property
    def sinks(self) -> torch.Tensor | None:
        """One more logit per head, side by side."""
        return None if self.args.sinks is None else self.args.sinks.contiguous()

    @cached_property
    def dropout(self) -> Dropout | None:
        """Dropout, or None."""
        p = self.spec.dropout_p
        if p == 0:
            return None
        # an integer threshold: p in float32 would differ from p in float64 for some p
        return Dropout(self.args.seed, math.ceil(p * 2**24), 1.0 / (1.0 - p) if p < 1 else 0.0)

    def sizes(self, tiles: int) -> Sizes:
        """Counts, with `tiles` programs per head."""
        group = self.q_heads // max(self.kv_heads, 1)
        return Sizes(self.q_heads, group, self.lq, self.lk, tiles)

    def config(self, kernel: str, described: tuple[torch.Tensor, ...] = ()) -> Config:
        """The launch configuration; with TMA only where these tensors can be `described`."""
        width = self.tensors[0].element_size()
        family = device_family(self.origin.device)
        config = launch.choose(kernel, family, max(self.block_d, self.block_dv), width)
        if config.tma and not (described and self._describable(described)):
            return config._replace(tma=False)
        return config

    def _describable(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        if (
            self.args.cu_seqlens_q is not None
            or min(self.d, self.dv, *(t.shape[2] for t in tensors)) < 16
        ):
            return False
        for t in tensors:
            width = t.element_size()
            steps = [t.stride(n) * width for n in range(3)]
            if t.data_ptr() % 16 or any(s % 16 or s <= 0 for s in steps):
                return False
        return True

    def descriptors(
        self, config: Config, a: torch.Tensor, b: torch.Tensor, rows: int
    ) -> tuple[Any, Any] | None:
        """TMA descriptors of a [B, H, L, D] and b [B, H, L, Dv], `rows` at a time; or None."""
        if not config.tma:
            return None
        from triton.tools.tensor_descriptor import TensorDescriptor

        found = []
        for t, columns in ((a, self.block_d), (b, self.block_dv)):
            block = [1, 1, rows, columns]
            found.append(TensorDescriptor(t, list(t.shape), list(t.stride()), block))
        return found[0], found[1]

    def query_grid(self, rows: int) -> tuple[int, tuple[int]]:
        """(tiles per head, grid) for programs of `rows` queries each."""
        return self._grid(self.lq, rows, self.q_heads)

    def key_grid(self, rows: int) -> tuple[int, tuple[int]]:
        """(tiles per head, grid) for programs of `rows` keys each."""
        return self._grid(self.lk, rows, self.kv_heads)

    def _grid(self, length: int, rows: int, heads: int) -> tuple[int, tuple[int]]:
        tiles = triton.cdiv(length, rows)
        if self.args.cu_seqlens_q is not None:  # each sequence may add a tile that is not full
            tiles += self.args.cu_seqlens_q.shape[0] - 1
            return tiles, (tiles * heads,)
        return tiles, (tiles * heads * self.batch,)

    def constants(self, config: Config) -> dict[str, Any]:
        """The constants that all kernels take."""
        sequences = 0 if self.args.cu_seqlens_q is None else self.args.cu_seqlens_q.shape[0]
        return {
            "D": self.d,
            "DV": self.dv,
            "BLOCK_D": self.block_d,
            "BLOCK_DV": self.block_dv,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "MOST": min(triton.next_power_of_2(max(sequences, 2)), _TOGETHER),
            "HOW": precision(self.origin.dtype),
        }

    def marks(self, grid: tuple[int, ...]) -> torch.Tensor | None:
        """One per program, for what is not finite; None where nothing may be hidden."""
        return self.origin.new_empty(grid, dtype=torch.int32) if self.masked else None

    def new_out(self, last: int) -> torch.Tensor:
        """An empty output in the layout of the query."""
        return empty_like(self.origin, last)

    def new_lse(self) -> torch.Tensor:
        """An empty [B, Hq, Lq] in float32."""
        return self.origin.new_empty(self.origin.shape[:3], dtype=torch.float32)


def clamped(limit: int | None, far: int) -> int | None:
    """A limit of the band, as a number that is not beyond what is out of sight anyway."""
    return None if limit is None else max(-far, min(limit, far))


def _stride(t: torch.Tensor, dim: int) -> int:
    """The stride along a dimension that may be broadcast by its size of 1."""
    return 0 if t.shape[dim] == 1 else t.stride(dim)
