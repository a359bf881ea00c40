"""The models of attnkit.models once more, of torch.nn's modules alone and with the same weights."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnkit.models import CausalLM, Seq2SeqTransformer
from attnkit.models.config import ModelConfig

Past = list[tuple[Tensor, Tensor]]


def torch_layer(kind: Any, config: ModelConfig) -> Any:
    """A layer of torch.nn with the sizes of ``config``."""
    return kind(
        config.d_model,
        config.num_heads,
        config.d_ff,
        config.dropout,
        config.activation,
        batch_first=True,
        norm_first=True,
    )


def torch_state(model: nn.Module, stack: str) -> dict[str, Tensor]:
    """The layers of one of our stacks, by the names that torch.nn has for them."""
    found = {}
    for name, value in model.state_dict().items():
        if name.startswith(f"{stack}."):
            name = re.sub("feed_forward.", "", name.removeprefix(f"{stack}."))
            found["layers." + name.replace("cross_attn", "multihead_attn")] = value
    return found


class TorchEmbedding(nn.Module):
    """Embeddings and sines as our models have them; padding stands on the right."""

    sines: Tensor

    def __init__(self, table: Any, positions: Any, dropout: float) -> None:
        super().__init__()
        self.table = copy.deepcopy(table)
        self.register_buffer("sines", positions.weight.clone())
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """[B, L, width] of the tokens [B, L] that stand at ``start`` and after it."""
        places = self.sines[start : start + tokens.shape[1]]
        width = self.table.embedding_dim
        return self.dropout(self.table(tokens) * math.sqrt(width) + places)


class TorchModel(nn.Module):
    """What its subclasses share."""

    def __init__(self, config: ModelConfig, output: nn.Linear | None, table: nn.Embedding) -> None:
        super().__init__()
        self.config = config
        self.output = copy.deepcopy(output)
        self._tied = [table]  # in a list, so that it is registered once

    def logits(self, x: Tensor) -> Tensor:
        """Scores of the vocabulary."""
        return F.linear(x, self._tied[0].weight) if self.output is None else self.output(x)

    def causal(self, tokens: Tensor) -> Tensor:
        """0 and -inf, [L, L]."""
        dtype = self._tied[0].weight.dtype
        return nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=dtype)

    def padding(self, tokens: Tensor) -> Tensor | None:
        """0 and -inf, [B, L]; None where no token is padding."""
        if self.config.pad_id is None:
            return None
        hidden = tokens == self.config.pad_id
        zeros = torch.zeros(tokens.shape, dtype=self._tied[0].weight.dtype)
        return zeros.masked_fill(hidden, -math.inf) if hidden.any() else None

    def stack(self, model: nn.Module, name: str, depth: int, norm: nn.Module) -> Any:
        """torch.nn's stack with the weights of one of ours."""
        config, (kind, layer) = self.config, STACKS["decoder" if name == "decoder" else "encoder"]
        nested = {} if name == "decoder" else {"enable_nested_tensor": False}
        made = kind(torch_layer(layer, config), depth, nn.LayerNorm(config.d_model), **nested)
        state = {f"norm.{key}": value for key, value in norm.state_dict().items()}
        made.load_state_dict(torch_state(model, name) | state)
        return made


STACKS = {
    "encoder": (nn.TransformerEncoder, nn.TransformerEncoderLayer),
    "decoder": (nn.TransformerDecoder, nn.TransformerDecoderLayer),
}


class TorchLM(TorchModel):
    """What CausalLM is."""

    def __init__(self, model: CausalLM) -> None:
        config = model.config
        embedding = TorchEmbedding(model.embedding, model.positions, config.dropout)
        super().__init__(config, model.output, embedding.table)
        self.embedding = embedding
        self.layers = self.stack(model, "layers", config.num_layers, model.norm)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, L, vocabulary]."""
        # padding on the right is seen by no token under the causal mask
        x = self.layers(self.embedding(tokens), mask=self.causal(tokens), is_causal=True)
        return self.logits(x)

    @torch.no_grad()
    def generate(self, prompt: Tensor, count: int) -> Tensor:
        """The likeliest tokens after the prompt, [B, count]."""
        past: Past = []
        fed, start, written = prompt, 0, []
        for _ in range(count):
            x = self.embedding(fed, start)
            start += fed.shape[1]
            for index, layer in enumerate(self.layers.layers):
                x = x + with_past(layer.self_attn, layer.norm1(x), past, index)
                x = x + layer._ff_block(layer.norm2(x))
            fed = self.logits(self.layers.norm(x[:, -1:])).argmax(-1)
            written.append(fed)
        return torch.cat(written, 1)


class TorchTranslator(TorchModel):
    """What Seq2SeqTransformer is."""

    def __init__(self, model: Seq2SeqTransformer) -> None:
        config = model.config
        source = TorchEmbedding(model.src_embedding, model.src_positions, config.dropout)
        shared = model.tgt_embedding is None
        table = model.src_embedding if shared else model.tgt_embedding
        target = TorchEmbedding(table, model.tgt_positions, config.dropout)
        if shared:
            target.table = source.table
        super().__init__(config, model.output, target.table)
        self.source, self.target = source, target
        self.encoder = self.stack(model, "encoder", config.num_encoder_layers, model.encoder_norm)
        self.decoder = self.stack(model, "decoder", config.num_decoder_layers, model.decoder_norm)

    def encode(self, source: Tensor) -> Tensor:
        """The encoder's output."""
        return self.encoder(self.source(source), src_key_padding_mask=self.padding(source))

    def decode(self, target: Tensor, memory: Tensor, hidden: Tensor | None) -> Tensor:
        """Logits of the target, from the encoder's output."""
        x = self.decoder(
            self.target(target),
            memory,
            tgt_mask=self.causal(target),
            memory_key_padding_mask=hidden,
            tgt_is_causal=True,
        )
        return self.logits(x)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits [B, L, vocabulary] of the target."""
        return self.decode(target, self.encode(source), self.padding(source))

    @torch.no_grad()
    def generate(self, source: Tensor, count: int) -> Tensor:
        """The likeliest translation, [B, count]."""
        encoded = self.encode(source)
        memory = [keys_values(layer.multihead_attn, encoded) for layer in self.decoder.layers]
        past: Past = []
        fed, written = source.new_ones(source.shape[0], 1), []  # bos is 1
        for start in range(count):
            x = self.target(fed, start)
            for index, (layer, kv) in enumerate(zip(self.decoder.layers, memory, strict=True)):
                x = x + with_past(layer.self_attn, layer.norm1(x), past, index)
                x = x + across(layer.multihead_attn, layer.norm2(x), kv)
                x = x + layer._ff_block(layer.norm3(x))
            fed = self.logits(self.decoder.norm(x)).argmax(-1)
            written.append(fed)
        return torch.cat(written, 1)


def heads_of(x: Tensor, heads: int) -> Tensor:
    """[B, L, H D] to [B, H, L, D]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def with_past(attention: Any, x: Tensor, past: Past, index: int) -> Tensor:
    """Self-attention of the new tokens x to themselves and those before; ``past`` grows."""
    projected = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    q, k, v = (heads_of(part, attention.num_heads) for part in projected.chunk(3, -1))
    if index == len(past):
        past.append((k, v))
    else:
        k, v = (torch.cat(pair, 2) for pair in zip(past[index], (k, v), strict=True))
        past[index] = k, v
    out = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
    return attention.out_proj(out.transpose(1, 2).flatten(2))


def keys_values(attention: Any, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the encoder's output, [B, H, L, D] each."""
    width = attention.embed_dim
    projected = F.linear(memory, attention.in_proj_weight[width:], attention.in_proj_bias[width:])
    k, v = (heads_of(part, attention.num_heads) for part in projected.chunk(2, -1))
    return k, v


def across(attention: Any, x: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-attention of x to keys and values."""
    width = attention.embed_dim
    projected = F.linear(x, attention.in_proj_weight[:width], attention.in_proj_bias[:width])
    q = heads_of(projected, attention.num_heads)
    return attention.out_proj(
        F.scaled_dot_product_attention(q, kv[0], kv[1]).transpose(1, 2).flatten(2)
    )
