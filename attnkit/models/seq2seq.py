"""p(target | source) = prod_t p(y_t | y_<t, source): the paper's encoder-decoder and its use."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attnkit.cache import KVCache
from attnkit.masks import causal, key_padding
from attnkit.models.generation import GenerationOutput, SearchOptions, beam_search, greedy_search
from attnkit.models.layers import Attention, DecoderBlock, EncoderBlock, KeyValue
from attnkit.nn import LearnedPositionalEncoding, SinusoidalPositionalEncoding

_POSITIONS = {"sinusoidal": SinusoidalPositionalEncoding, "learned": LearnedPositionalEncoding}


@dataclass(frozen=True)
class Seq2SeqConfig:
    """Sizes of a :class:`Seq2SeqTransformer`; the defaults are the base model of the paper.

    Args:
        src_vocab, tgt_vocab: numbers of token ids.
        d_ff: inner size of the feed-forward networks; None is ``4 * d_model``.
        dropout: of embeddings, attention weights, feed-forward networks and residual branches.
        max_length: the longest source and target in tokens, ``bos`` included.
        norm_first: Pre-Norm instead of the paper's Post-Norm.
        activation: "relu", "gelu" or "swiglu".
        positions: "sinusoidal" or "learned".
        tie_embeddings: the output projection is the target embedding.
        share_embeddings: source and target have one embedding (and one vocabulary).
        pad_id, bos_id, eos_id: padding, first and last token; three different ids.
    """

    src_vocab: int
    tgt_vocab: int
    d_model: int = 512
    num_heads: int = 8
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    d_ff: int | None = 2048
    dropout: float = 0.1
    max_length: int = 512
    norm_first: bool = False
    activation: str = "relu"
    positions: str = "sinusoidal"
    tie_embeddings: bool = False
    share_embeddings: bool = False
    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2

    def __post_init__(self) -> None:
        for name in (
            "src_vocab",
            "tgt_vocab",
            "d_model",
            "num_heads",
            "num_encoder_layers",
            "num_decoder_layers",
            "max_length",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 1 or more")
        if self.d_model % self.num_heads:
            raise ValueError(
                f"d_model is {self.d_model}, expected a multiple of num_heads, {self.num_heads}"
            )
        if not 0.0 <= self.dropout <= 1.0:
            raise ValueError(f"dropout is {self.dropout}, expected 0 to 1")
        if self.positions not in _POSITIONS:
            raise ValueError(f"positions is {self.positions!r}, expected one of {list(_POSITIONS)}")
        if self.share_embeddings and self.src_vocab != self.tgt_vocab:
            raise ValueError(
                f"share_embeddings needs one vocabulary: src_vocab is {self.src_vocab}, "
                f"tgt_vocab is {self.tgt_vocab}"
            )
        special = {"pad_id": self.pad_id, "bos_id": self.bos_id, "eos_id": self.eos_id}
        if len(set(special.values())) < len(special):
            raise ValueError(f"{special} are not three different ids")
        for name, token in special.items():
            if not 0 <= token < self.tgt_vocab:
                raise ValueError(
                    f"{name} is {token}, expected 0 to {self.tgt_vocab - 1}, below tgt_vocab"
                )
        if self.pad_id >= self.src_vocab:
            raise ValueError(
                f"pad_id is {self.pad_id}, expected less than src_vocab, {self.src_vocab}"
            )


@dataclass(eq=False)
class DecoderState:
    """What the decoder knows of a batch of sources, and of the targets so far if it has caches.

    ``memory`` holds one pair of projected keys and values [B, H, S, D] per layer, ``keep`` [B, S]
    the source positions that are not padding.  The caches have R rows, B or a multiple of it: R / B
    targets (beams) in turn belong to each source.
    """

    memory: list[KeyValue]
    keep: Tensor
    caches: list[KVCache] | None = None

    def reorder(self, rows: Tensor) -> None:
        """Target r goes on from what target ``rows[r]`` was; both must have the same source."""
        for cache in self.caches or ():
            cache.reorder(rows)


class Seq2SeqTransformer(nn.Module):
    """Encoder, decoder and output projection over token ids.

    Padding is told by ``config.pad_id``, on either side: positions count real tokens, so that a
    sequence gives what it gives alone.  Both stacks end in a LayerNorm, as torch.nn.Transformer's.
    """

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.config = config
        d_model = config.d_model
        d_ff = 4 * d_model if config.d_ff is None else config.d_ff
        sizes = (
            d_model,
            config.num_heads,
            d_ff,
            config.dropout,
            config.activation,
            config.norm_first,
        )
        self.src_embedding = nn.Embedding(config.src_vocab, d_model)
        self.tgt_embedding = (
            None if config.share_embeddings else nn.Embedding(config.tgt_vocab, d_model)
        )
        positions = _POSITIONS[config.positions]
        self.src_positions = positions(d_model, config.max_length, config.dropout)
        self.tgt_positions = positions(d_model, config.max_length, config.dropout)
        self.encoder = nn.ModuleList(EncoderBlock(*sizes) for _ in range(config.num_encoder_layers))
        self.decoder = nn.ModuleList(DecoderBlock(*sizes) for _ in range(config.num_decoder_layers))
        self.encoder_norm = nn.LayerNorm(d_model)
        self.decoder_norm = nn.LayerNorm(d_model)
        self.output = (
            None if config.tie_embeddings else nn.Linear(d_model, config.tgt_vocab, bias=False)
        )
        self._initialise()

    def _initialise(self) -> None:
        """Glorot-uniform matrices; embeddings of unit variance once scaled by sqrt(d_model)."""
        for block in (*self.encoder, *self.decoder):
            for parameter in block.parameters():
                if parameter.dim() > 1:
                    nn.init.xavier_uniform_(parameter)
        if self.output is not None:
            nn.init.xavier_uniform_(self.output.weight)
        for table in (self.src_embedding, self.tgt_embedding):
            if table is not None:
                nn.init.normal_(table.weight, std=self.config.d_model**-0.5)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Teacher forcing: logits [B, T, tgt_vocab] of the token after each of tgt.

        Args:
            src: int64 [B, S], padded with ``pad_id`` on either side.
            tgt: int64 [B, T], beginning with ``bos_id``, padded likewise; the loss is taken against
                the same sequence one token on, ``tgt[:, 1:]`` and ``eos_id``.

        Raises:
            ValueError: other shapes or dtypes, or a sequence longer than ``max_length``.
        """
        if src.shape[:1] != tgt.shape[:1]:
            raise ValueError(f"tgt has {tgt.shape[0]} rows, src has {src.shape[0]}")
        return self.decode(tgt, self.start(src))

    def encode(self, src: Tensor) -> Tensor:
        """The encoder's output [B, S, d_model]; rows at padding hold numbers of no meaning."""
        self._check_tokens("src", src)
        keep = src != self.config.pad_id
        mask = key_padding(keep)
        x = self._embed(self.src_embedding, self.src_positions, src, _positions(keep))
        for block in self.encoder:
            x = block(x, mask)
        return cast(Tensor, self.encoder_norm(x))

    def start(self, src: Tensor, *, capacity: int | None = None, beams: int = 1) -> DecoderState:
        """Encode src [B, S], and project the keys and values of cross-attention, once per sequence.

        With a ``capacity`` the state gets empty caches for ``beams`` targets of that many tokens
        per source, and :meth:`decode` is to be given only the tokens that follow.
        """
        encoded = self.encode(src)
        memory = [block.cross_attn.keys_values(encoded) for block in self._decoder_blocks()]
        caches = None
        if capacity is not None:
            # self-attention's keys have the shape and the dtype (autocast) of cross-attention's
            caches = [KVCache.like(*kv, capacity, batch=beams * src.shape[0]) for kv in memory]
        return DecoderState(memory, src != self.config.pad_id, caches)

    def decode(self, tgt: Tensor, state: DecoderState, *, last: bool = False) -> Tensor:
        """Logits [R, T, tgt_vocab] of the token after each of tgt [R, T]; ``last``: of one only.

        If the state has caches, tgt holds the tokens that follow those given before, without
        padding, and is added to the caches.  Compiled with ``fullgraph=True`` all single steps
        share one graph.
        """
        self._check_tokens("tgt", tgt)
        memory_mask = key_padding(state.keep)
        if state.caches:
            mask = None
            positions = state.caches[0].lengths[:, None] + torch.arange(
                tgt.shape[1], device=tgt.device
            )
        else:
            keep = tgt != self.config.pad_id
            mask, positions = causal() & key_padding(keep), _positions(keep)
        x = self._embed(self._target_embedding(), self.tgt_positions, tgt, positions)
        caches: list[KVCache] | list[None] = state.caches or [None] * len(state.memory)
        for block, kv, cache in zip(self.decoder, state.memory, caches, strict=True):
            x = block(x, kv, mask=mask, memory_mask=memory_mask, cache=cache)
        x = self.decoder_norm(x[:, -1:] if last else x)
        weight = self._target_embedding().weight if self.output is None else self.output.weight
        return F.linear(x, weight)

    @torch.no_grad()
    def generate(
        self,
        src: Tensor,
        max_length: int | None = None,
        *,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        use_cache: bool = True,
    ) -> GenerationOutput:
        """Translate src [B, S] greedily, or by beam search with ``num_beams`` > 1.  Dropout is off.

        Args:
            max_length: the most tokens to generate, ``eos_id`` included; None is the config's.
            num_beams: beams kept per source; 1 is greedy.
            length_penalty: alpha in score = (sum of log-probabilities) / length ** alpha, where
                length counts the generated tokens, ``eos_id`` included.
            early_stopping: end a row's beam search when ``num_beams`` hypotheses have ended, even
                if one that goes on could still become the best.
            use_cache: keep keys and values; without, each step decodes the whole prefix anew.

        Returns:
            Tokens [B, T], T <= max_length, without ``bos_id``, padded after ``eos_id``; scores [B];
            lengths [B].  A row that never ends has exactly ``max_length`` tokens.  ``pad_id`` is
            never generated (its probability is not given to others).
        """
        config = self.config
        max_length = config.max_length if max_length is None else max_length
        if not 0 <= max_length <= config.max_length:
            raise ValueError(
                f"max_length is {max_length}, expected 0 to {config.max_length}, the config's"
            )
        if num_beams < 1:
            raise ValueError(f"num_beams is {num_beams}, expected 1 or more")
        with _evaluating(self):
            state = self.start(src, capacity=max_length if use_cache else None, beams=num_beams)

            def next_logits(tokens: Tensor) -> Tensor:
                tokens = tokens[:, -1:] if use_cache else tokens
                return self.decode(tokens, state, last=True)[:, 0]

            options = SearchOptions(
                max_length,
                config.bos_id,
                config.eos_id,
                config.pad_id,
                length_penalty,
                num_beams,
                early_stopping,
            )
            batch, device = src.shape[0], src.device
            if num_beams == 1:
                return greedy_search(next_logits, batch, device, options)
            return beam_search(next_logits, state.reorder, batch, device, options)

    @torch.no_grad()
    def attention_maps(
        self,
        src: Tensor,
        tgt: Tensor,
        layer: int = -1,
        kind: Literal["cross", "self", "encoder"] = "cross",
    ) -> Tensor:
        """The weights [B, H, L, S] of one layer when the model scores tgt given src, no dropout.

        ``kind`` "cross": tgt to src, "self": tgt to tgt, "encoder": src to src.  They are taken
        from the inputs of that layer's attention, by a hook, in a run of ``forward``.
        """
        blocks = self.encoder if kind == "encoder" else self.decoder
        if kind not in ("cross", "self", "encoder"):
            raise ValueError(f"kind is {kind!r}, expected 'cross', 'self' or 'encoder'")
        if not -len(blocks) <= layer < len(blocks):
            raise ValueError(f"layer is {layer}, expected -{len(blocks)} to {len(blocks) - 1}")
        block = blocks[layer]
        attention = cast(Attention, block.cross_attn if kind == "cross" else block.self_attn)
        caught: list[Tensor] = []

        def catch(module: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught.append(module.weights(*args, **kwargs))

        handle = attention.register_forward_pre_hook(cast(Any, catch), with_kwargs=True)
        try:
            with _evaluating(self):
                self(src, tgt)
        finally:
            handle.remove()
        return caught[0]

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write ``model.safetensors`` and ``config.json``, each replaced whole or not at all."""
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        config = json.dumps(dataclasses.asdict(self.config), indent=2) + "\n"
        state = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        with _replacing(path / "model.safetensors") as temporary:
            save_file(state, temporary)
        with _replacing(path / "config.json") as temporary:
            temporary.write_text(config, encoding="utf-8")

    @classmethod
    def from_pretrained(
        cls, directory: str | os.PathLike[str], device: torch.device | str = "cpu"
    ) -> Seq2SeqTransformer:
        """What :meth:`save_pretrained` wrote, in the dtype of its weights and in eval mode."""
        path = Path(directory)
        config = Seq2SeqConfig(**json.loads((path / "config.json").read_text(encoding="utf-8")))
        state = load_file(path / "model.safetensors", device=str(device))
        model = cls(config).to(device=device, dtype=state["encoder_norm.weight"].dtype)
        model.load_state_dict(state)
        return model.eval()

    def _target_embedding(self) -> nn.Embedding:
        return self.src_embedding if self.tgt_embedding is None else self.tgt_embedding

    def _decoder_blocks(self) -> list[DecoderBlock]:
        return [cast(DecoderBlock, block) for block in self.decoder]

    def _embed(
        self, table: nn.Embedding, encoding: nn.Module, tokens: Tensor, positions: Tensor
    ) -> Tensor:
        return cast(Tensor, encoding(table(tokens) * math.sqrt(self.config.d_model), positions))

    def _check_tokens(self, name: str, tokens: Tensor) -> None:
        if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"{name} is {tokens.dtype} {tuple(tokens.shape)}, expected int64 [batch, tokens]"
            )
        if tokens.shape[1] > self.config.max_length:
            raise ValueError(
                f"{name} has {tokens.shape[1]} tokens, expected at most {self.config.max_length}, "
                "the config's max_length"
            )


def _positions(keep: Tensor) -> Tensor:
    """The place [B, L] of each token among the real ones of its row: padding shifts nothing."""
    return (keep.cumsum(-1) - 1).clamp(min=0)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for a while; afterwards every module has the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path`` to write to; on success it is synced and takes the name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
