"""x <- norm(x + sublayer(x)), the paper's Post-Norm, or x + sublayer(norm(x)), Pre-Norm.

One path serves training, scoring and cached decoding: an attention takes its keys and values from
its input, or adds these to a cache, or is handed them ready-made (cross-attention).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnkit.cache import KVCache, RingKVCache
from attnkit.functional import attention
from attnkit.masks import Mask, key_padding, sliding_window
from attnkit.models.config import ModelConfig
from attnkit.nn import (
    FeedForward,
    LearnedPositionalEncoding,
    RelativePositionBias,
    RMSNorm,
    RotaryEmbedding,
    SinusoidalPositionalEncoding,
    alibi_slopes,
)

Cache = KVCache | RingKVCache
Rotation = Callable[[Tensor], Tensor]


class KeyValue(NamedTuple):
    """Projected keys and values, [B, H, S, D] each."""

    key: Tensor
    value: Tensor


class Sight(NamedTuple):
    """What one self-attention goes by: which keys it sees, and how it knows where they stand.

    A cache brings causality and its own lengths; then ``mask`` is not needed.  ``counts`` are those
    of :meth:`KVCache.append`.
    """

    mask: Mask | None = None
    rotate: Rotation | None = None  # of queries and keys [B, L, H, D]
    alibi: Tensor | None = None  # [H]
    bias: Tensor | None = None  # [B or 1, H, L, S]
    cache: Cache | None = None
    counts: Tensor | None = None  # int32 [B]


SEES_ALL = Sight()


class Attention(nn.Module):
    """Multi-head attention with the parameters of ``torch.nn.MultiheadAttention``, by its names.

    With ``num_kv_heads`` H' below ``num_heads`` H, ``in_proj_weight`` has (H + 2 H') D rows.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = d_model // num_heads
        self.dropout = dropout
        self.left = None if window is None else window - 1
        width = d_model + 2 * self.num_kv_heads * self.head_dim
        self.in_proj_weight = nn.Parameter(torch.empty(width, d_model))
        self.in_proj_bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self, x: Tensor, memory: KeyValue | None = None, *, sight: Sight = SEES_ALL
    ) -> Tensor:
        """Attend from x [R, L, E] to ``memory`` if given, else to x and to what a cache holds.

        ``memory`` may have fewer rows, B: then R / B rows of x in turn (the beams of a sequence)
        share a row of it, and the mask may not depend on the query.  With a cache, x is added to
        it, and causality, the window and its own ``keep`` are the mask.
        """
        query, kv = self._project(x, memory, sight.rotate)
        cache = sight.cache
        if cache is None:
            dropout_p = self.dropout if self.training else 0.0
            out = attention(
                query, *kv, mask=sight.mask, bias=sight.bias, alibi=sight.alibi, dropout_p=dropout_p
            )
        elif isinstance(cache, RingKVCache):  # as large as the window
            out = cache.extend(query, *kv, counts=sight.counts)
        else:
            slopes = {} if sight.alibi is None else {"alibi": sight.alibi}
            out = cache.extend(
                query, *kv, counts=sight.counts, bias=sight.bias, left=self.left, **slopes
            )
        return cast(Tensor, self.out_proj(out.transpose(1, 2).reshape(x.shape)))

    def attention_inputs(
        self, x: Tensor, memory: KeyValue | None = None, *, sight: Sight = SEES_ALL
    ) -> dict[str, Any]:
        """For :mod:`attnkit.recording`: what ``forward`` would give `attention_weights`."""
        if sight.cache is not None:
            raise ValueError("cache was given: weights are taken from a run without one")
        query, kv = self._project(x, memory, sight.rotate)
        return {
            "kind": "self" if memory is None else "cross",
            "query": query,
            "key": kv.key,
            "mask": sight.mask,
            "bias": sight.bias,
            "alibi": sight.alibi,
        }

    def keys_values(self, source: Tensor) -> KeyValue:
        """Keys and values of source [B, S, E], for later use as ``memory``."""
        width = source.shape[-1]
        heads = self._heads(source, slice(width, None))
        return KeyValue(*(t.transpose(1, 2) for t in heads.chunk(2, dim=2)))

    def _project(
        self, x: Tensor, memory: KeyValue | None, rotate: Rotation | None
    ) -> tuple[Tensor, KeyValue]:
        if memory is None:
            heads, sizes = self._heads(x), (self.num_heads, self.num_kv_heads)
            # split, not sliced: the gradients are then put together by one copy
            if rotate is None:
                query, key, value = heads.split_with_sizes((*sizes, self.num_kv_heads), dim=2)
            else:
                # queries and keys lie side by side: one turn for both
                both, value = heads.split_with_sizes((sum(sizes), self.num_kv_heads), dim=2)
                query, key = rotate(both).split_with_sizes(sizes, dim=2)
            return query.transpose(1, 2), KeyValue(key.transpose(1, 2), value.transpose(1, 2))
        rows = memory.key.shape[0]
        if rows != x.shape[0]:
            # beams of one sequence become queries side by side: its memory is not copied for them
            x = x.reshape(rows, -1, x.shape[-1])
        return self._heads(x, slice(x.shape[-1])).transpose(1, 2), memory

    def _heads(self, x: Tensor, part: slice | None = None) -> Tensor:
        """[B, L, E] through the projection, or some rows of it, as [B, L, heads, D]."""
        weight: Tensor = self.in_proj_weight
        bias: Tensor | None = self.in_proj_bias
        if part is not None:
            weight, bias = weight[part], None if bias is None else bias[part]
        heads = weight.shape[0] // self.head_dim
        return F.linear(x, weight, bias).view(*x.shape[:-1], heads, self.head_dim)


class _Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.dropout = nn.Dropout(config.dropout)

    def _residual(self, x: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        y = sublayer(norm(x) if self.norm_first else x)
        if self.training:  # a call for nothing costs a decoding step
            y = self.dropout(y)
        return x + y if self.norm_first else cast(Tensor, norm(x + y))


class Block(_Block):
    """Self-attention, then the feed-forward network: of an encoder, or of a decoder alone."""

    def __init__(self, config: ModelConfig, window: int | None = None) -> None:
        super().__init__(config)
        self.self_attn = _self_attention(config, window)
        self.feed_forward = _feed_forward(config)
        self.norm1, self.norm2 = norm_of(config), norm_of(config)

    def forward(self, x: Tensor, sight: Sight = SEES_ALL) -> Tensor:
        """x [B, L, E]: whole sequences, or with a cache the tokens that follow."""
        x = self._residual(x, self.norm1, lambda y: self.self_attn(y, sight=sight))
        return self._residual(x, self.norm2, self.feed_forward)


class CrossBlock(_Block):
    """Self-attention, cross-attention, then the feed-forward network."""

    def __init__(self, config: ModelConfig, window: int | None = None) -> None:
        super().__init__(config)
        self.self_attn = _self_attention(config, window)
        self.cross_attn = Attention(
            config.d_model, config.num_heads, dropout=config.dropout, bias=config.bias
        )
        self.feed_forward = _feed_forward(config)
        self.norm1, self.norm2, self.norm3 = norm_of(config), norm_of(config), norm_of(config)

    def forward(self, x: Tensor, sight: Sight, memory: KeyValue, memory_sight: Sight) -> Tensor:
        """x [R, T, E]: whole targets, or with a cache the tokens that follow."""
        x = self._residual(x, self.norm1, lambda y: self.self_attn(y, sight=sight))
        x = self._residual(x, self.norm2, lambda y: self.cross_attn(y, memory, sight=memory_sight))
        return self._residual(x, self.norm3, self.feed_forward)


def _self_attention(config: ModelConfig, window: int | None) -> Attention:
    return Attention(
        config.d_model,
        config.num_heads,
        config.num_kv_heads,
        dropout=config.dropout,
        bias=config.bias,
        window=window,
    )


def _feed_forward(config: ModelConfig) -> FeedForward:
    return FeedForward(
        config.d_model,
        config.d_ff,
        dropout=config.dropout,
        activation=config.activation,
        bias=config.bias,
    )


def norm_of(config: ModelConfig) -> nn.Module:
    """The normalisation that a configuration names."""
    if config.norm == "rms":
        return RMSNorm(config.d_model, eps=1e-6)
    return nn.LayerNorm(config.d_model, bias=config.bias)


def positions_of(config: ModelConfig, causal: bool) -> nn.Module | None:
    """The module with which one stack tells positions; None if it needs none (ALiBi, or none)."""
    if config.positions == "sinusoidal":
        return SinusoidalPositionalEncoding(config.d_model, config.max_length)
    if config.positions == "learned":
        return LearnedPositionalEncoding(config.d_model, config.max_length)
    if config.positions == "rope":
        return RotaryEmbedding(
            config.head_dim,
            config.rope_dim,
            theta=config.rope_theta,
            interleaved=config.rope_interleaved,
            scaling=config.rope_scaling,
            factor=config.rope_factor,
        )
    if config.positions == "relative":
        return RelativePositionBias(config.num_heads, bidirectional=not causal)
    return None


def positions_in(keep: Tensor) -> Tensor:
    """The place [B, L] of each token among the real ones of its row: padding shifts nothing."""
    return (keep.cumsum(-1) - 1).clamp(min=0)


def sights(
    config: ModelConfig,
    encoding: nn.Module | None,
    x: Tensor,
    positions: Tensor,
    windows: Sequence[int | None],
    *,
    causal: bool,
    keep: Tensor | None = None,
    caches: Sequence[Cache] | None = None,
    counts: Tensor | None = None,
) -> list[Sight]:
    """What the self-attention of each layer goes by, in one run over x [B, L, E].

    Args:
        config: of the model.
        encoding: of the stack, by :func:`positions_of`.
        x: the stack's input.
        positions: [B, L] or [1, L] of its tokens.
        windows: one for each layer.
        causal: whether a token sees those after it.
        keep: bool [B, L], which tokens are real; None: all.
        caches: one for each layer, then ``keep`` is not read.
        counts: of the new tokens, for the caches.
    """
    rotate = alibi = bias = None
    if isinstance(encoding, RotaryEmbedding):
        cos, sin = (t[:, :, None] for t in encoding.tables(positions, x.dtype))

        def rotate(heads: Tensor, module: RotaryEmbedding = encoding) -> Tensor:
            return module.rotate(heads, cos, sin)

    elif isinstance(encoding, RelativePositionBias):
        # padding at either end leaves the distances of tokens as they are
        if caches is None:
            places = torch.arange(x.shape[1], device=x.device)
            bias = encoding(places, places)
        else:
            slots = torch.arange(caches[0].capacity, device=x.device)
            bias = encoding(positions, slots)
    elif config.positions == "alibi":
        alibi = alibi_slopes(config.num_heads, x.device)
    common = Sight(None, rotate, alibi, bias, None, counts)
    if caches is not None:
        return [common._replace(cache=cache) for cache in caches]
    masks = {window: _mask(window, causal, keep) for window in set(windows)}
    return [common._replace(mask=masks[window]) for window in windows]


def new_caches(
    config: ModelConfig, windows: Sequence[int | None], batch: int, capacity: int, like: Tensor
) -> list[Cache]:
    """Empty caches for a stack, in the dtype that a projection with weights such as ``like`` has.

    A layer whose window is shorter than ``capacity`` gets a ring, unless a bias depends on the
    order of the cache's slots.
    """
    device, dtype = like.device, like.dtype
    if dtype != torch.float64 and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    ordered = config.positions in ("alibi", "relative")
    caches: list[Cache] = []
    for window in windows:
        ring = window is not None and window < capacity and not ordered
        kind: type[Cache] = RingKVCache if ring else KVCache
        slots = window if ring and window is not None else capacity
        caches.append(
            kind.allocate(
                batch, config.kv_heads, slots, config.head_dim, dtype=dtype, device=device
            )
        )
    return caches


def _mask(window: int | None, causal: bool, keep: Tensor | None) -> Mask | None:
    reach = None if window is None else window - 1
    mask = sliding_window(reach, 0 if causal else reach) if causal or reach is not None else None
    if keep is None:
        return mask
    real = key_padding(keep)
    return real if mask is None else mask & real
