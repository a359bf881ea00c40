"""p(class | x) = softmax(W pool(encoder(x)) + b): one label for a sequence of tokens."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from attnkit.masks import key_padding
from attnkit.models.config import TransformerConfig
from attnkit.models.layers import (
    Attention,
    Block,
    Sight,
    norm_of,
    positions_in,
    positions_of,
    sights,
)
from attnkit.models.pretrained import PretrainedModel


class Classifier(PretrainedModel):
    """An encoder, a norm, one vector per sequence (``config.pooling``), and a linear layer.

    Pooling takes the vector of a row's "first" real token, the "mean" over the real ones, or what
    a learned query attends to, with ``config.num_heads`` heads ("attention").

    Padding is told by ``config.pad_id``, on either side, and never matters.  A row of padding alone
    gives numbers of no meaning, and no NaN.
    """

    config: TransformerConfig
    config_class = TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        if config.num_classes is None:
            raise config.wrong("num_classes", "an int for a Classifier")
        d_model = config.d_model
        self.embedding = nn.Embedding(config.vocab_size, d_model)
        self.positions = positions_of(config, causal=False)
        self.windows = config.windows(config.num_layers)
        self.layers = nn.ModuleList(Block(config, window) for window in self.windows)
        self.norm = norm_of(config)
        self.pool: Attention | None = None
        if config.pooling == "attention":
            self.pool = Attention(
                d_model, config.num_heads, dropout=config.dropout, bias=config.bias
            )
            self.query = nn.Parameter(torch.randn(d_model))
        self.output = nn.Linear(d_model, config.num_classes)
        self._initialise()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, num_classes] of tokens int64 [B, T].

        Raises:
            ValueError: another shape or dtype, no tokens, or more than ``max_length``.
        """
        self._check_tokens("tokens", tokens)
        if not tokens.shape[1]:
            raise ValueError("tokens has 0 tokens, expected 1 or more")
        keep = self._keep(tokens)
        if keep is None:
            keep = torch.ones_like(tokens, dtype=torch.bool)
        return cast(Tensor, self.output(self._pooled(self._encode(tokens, keep), keep)))

    def _encode(self, tokens: Tensor, keep: Tensor) -> Tensor:
        positions = positions_in(keep)
        x = self._embed(self.embedding, self.positions, tokens, positions)
        seen = sights(
            self.config, self.positions, x, positions, self.windows, causal=False, keep=keep
        )
        for block, sight in zip(self.layers, seen, strict=True):
            x = block(x, sight)
        return cast(Tensor, self.norm(x))

    def _pooled(self, x: Tensor, keep: Tensor) -> Tensor:
        """One vector [B, E] of x [B, T, E]."""
        if self.pool is not None:
            query = self.query.to(x.dtype).expand(x.shape[0], 1, -1)
            sight = Sight(mask=key_padding(keep))
            return cast(Tensor, self.pool(query, self.pool.keys_values(x), sight=sight))[:, 0]
        if self.config.pooling == "first":
            rows = torch.arange(x.shape[0], device=x.device)
            return x[rows, keep.byte().argmax(dim=1)]
        weight = keep / keep.sum(dim=1, keepdim=True).clamp(min=1)  # [B, T]
        return torch.einsum("bt,bte->be", weight.to(x.dtype), x)
