"""x <- norm(x + sublayer(x)), the paper's Post-Norm, or x + sublayer(norm(x)), Pre-Norm.

One path serves training, scoring and cached decoding: an attention takes its keys and values from
its input, or adds these to a cache, or is handed them ready-made (cross-attention).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnkit.cache import KVCache
from attnkit.functional import attention, attention_weights
from attnkit.masks import Mask
from attnkit.nn import FeedForward


class KeyValue(NamedTuple):
    """Projected keys and values, [B, H, S, D] each."""

    key: Tensor
    value: Tensor


class Attention(nn.Module):
    """Multi-head attention with the parameters of ``torch.nn.MultiheadAttention``, by its names."""

    def __init__(self, d_model: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * d_model, d_model))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * d_model))
        self.out_proj = nn.Linear(d_model, d_model)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        x: Tensor,
        memory: KeyValue | None = None,
        *,
        mask: Mask | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attend from x [R, L, E] to ``memory`` if given, else to x and to what ``cache`` holds.

        ``memory`` may have fewer rows, B: then R / B rows of x in turn (the beams of a sequence)
        share a row of it, and the mask may not depend on the query.  With a cache, x is added to
        it, and causality and its own ``keep`` are the mask.
        """
        query, kv = self._project(x, memory)
        if cache is None:
            dropout_p = self.dropout if self.training else 0.0
            out = attention(query, *kv, mask=mask, dropout_p=dropout_p)
        else:
            cache.append(*kv)
            out = cache.attend(query)
        return cast(Tensor, self.out_proj(out.transpose(1, 2).reshape(x.shape)))

    def weights(
        self,
        x: Tensor,
        memory: KeyValue | None = None,
        *,
        mask: Mask | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The weights [B, H, L, S] that ``forward`` uses without dropout, computed apart."""
        if cache is not None:
            raise ValueError("cache was given: weights are taken from a run without one")
        query, kv = self._project(x, memory)
        return attention_weights(query, kv.key, mask=mask)

    def keys_values(self, source: Tensor) -> KeyValue:
        """Keys and values of source [B, S, E], for later use as ``memory``."""
        width = source.shape[-1]
        projected = F.linear(source, self.in_proj_weight[width:], self.in_proj_bias[width:])
        return KeyValue(*self._heads(projected, 2))

    def _project(self, x: Tensor, memory: KeyValue | None) -> tuple[Tensor, KeyValue]:
        if memory is None:
            projected = F.linear(x, self.in_proj_weight, self.in_proj_bias)
            query, key, value = self._heads(projected, 3)
            return query, KeyValue(key, value)
        width, rows = x.shape[-1], memory.key.shape[0]
        if rows != x.shape[0]:
            # beams of one sequence become queries side by side: its memory is not copied for them
            x = x.reshape(rows, -1, width)
        (query,) = self._heads(
            F.linear(x, self.in_proj_weight[:width], self.in_proj_bias[:width]), 1
        )
        return query, memory

    def _heads(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """[B, L, parts * E] to ``parts`` views [B, H, L, D]."""
        return x.unflatten(-1, (parts, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


class _Block(nn.Module):
    def __init__(self, dropout: float, norm_first: bool) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.dropout = nn.Dropout(dropout)

    def _residual(self, x: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            return x + cast(Tensor, self.dropout(sublayer(norm(x))))
        return cast(Tensor, norm(x + self.dropout(sublayer(x))))


class EncoderBlock(_Block):
    """Self-attention, then the feed-forward network."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        dropout: float,
        activation: str,
        norm_first: bool,
    ) -> None:
        super().__init__(dropout, norm_first)
        self.self_attn = Attention(d_model, num_heads, dropout)
        self.feed_forward = FeedForward(d_model, d_ff, dropout=dropout, activation=activation)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        """x [B, S, E]; ``mask`` says which of its positions may be attended."""
        x = self._residual(x, self.norm1, lambda y: self.self_attn(y, mask=mask))
        return self._residual(x, self.norm2, self.feed_forward)


class DecoderBlock(_Block):
    """Self-attention, cross-attention, then the feed-forward network."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        dropout: float,
        activation: str,
        norm_first: bool,
    ) -> None:
        super().__init__(dropout, norm_first)
        self.self_attn = Attention(d_model, num_heads, dropout)
        self.cross_attn = Attention(d_model, num_heads, dropout)
        self.feed_forward = FeedForward(d_model, d_ff, dropout=dropout, activation=activation)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.norm3 = nn.LayerNorm(d_model)

    def forward(
        self,
        x: Tensor,
        memory: KeyValue,
        *,
        mask: Mask | None = None,
        memory_mask: Mask | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """x [R, T, E]: whole targets under ``mask``, or with a cache the tokens that follow."""
        x = self._residual(x, self.norm1, lambda y: self.self_attn(y, mask=mask, cache=cache))
        x = self._residual(x, self.norm2, lambda y: self.cross_attn(y, memory, mask=memory_mask))
        return self._residual(x, self.norm3, self.feed_forward)
