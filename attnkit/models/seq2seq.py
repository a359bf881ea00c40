"""p(target | source) = prod_t p(y_t | y_<t, source): the paper's encoder-decoder and its use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnkit.masks import key_padding
from attnkit.models.config import Seq2SeqConfig
from attnkit.models.generation import GenerationOptions, GenerationOutput, Session
from attnkit.models.generative import GenerativeModel
from attnkit.models.layers import (
    Block,
    Cache,
    CrossBlock,
    KeyValue,
    Sight,
    new_caches,
    norm_of,
    positions_in,
    positions_of,
    sights,
)
from attnkit.models.pretrained import evaluating
from attnkit.recording import record


@dataclass(eq=False)
class DecoderState:
    """What the decoder knows of a batch of sources, and of the targets so far if it has caches.

    ``memory`` holds one pair of projected keys and values [B, H, S, D] per layer, ``keep`` [B, S]
    the source positions that are not padding.  The caches have R rows, B or a multiple of it: R / B
    targets (beams) in turn belong to each source.
    """

    memory: list[KeyValue]
    keep: Tensor
    caches: list[Cache] | None = None

    def reorder(self, rows: Tensor) -> None:
        """Target r goes on from what target ``rows[r]`` was; both must have the same source."""
        for cache in self.caches or ():
            cache.reorder(rows)


class Seq2SeqTransformer(GenerativeModel):
    """Encoder, decoder and output projection over token ids.

    Padding is told by ``config.pad_id``, on either side: positions count real tokens, so that a
    sequence gives what it gives alone.  Both stacks end in a norm, as torch.nn.Transformer's.
    """

    config: Seq2SeqConfig
    config_class = Seq2SeqConfig

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config)
        d_model = config.d_model
        self.src_embedding = nn.Embedding(config.src_vocab, d_model)
        self.tgt_embedding = (
            None if config.share_embeddings else nn.Embedding(config.tgt_vocab, d_model)
        )
        self.src_positions = positions_of(config, causal=False)
        self.tgt_positions = positions_of(config, causal=True)
        self.src_windows = config.windows(config.num_encoder_layers)
        self.tgt_windows = config.windows(config.num_decoder_layers)
        self.encoder = nn.ModuleList(Block(config, window) for window in self.src_windows)
        self.decoder = nn.ModuleList(CrossBlock(config, window) for window in self.tgt_windows)
        self.encoder_norm = norm_of(config)
        self.decoder_norm = norm_of(config)
        self.output = (
            None if config.tie_embeddings else nn.Linear(d_model, config.tgt_vocab, bias=False)
        )
        self._initialise()

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
        keep = self._real(src)
        positions = positions_in(keep)
        x = self._embed(self.src_embedding, self.src_positions, src, positions)
        seen = sights(
            self.config, self.src_positions, x, positions, self.src_windows, causal=False, keep=keep
        )
        for block, sight in zip(self.encoder, seen, strict=True):
            x = block(x, sight)
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
            # every token to come reads them: head by head they lie better than as they were made
            memory = [KeyValue(kv.key.contiguous(), kv.value.contiguous()) for kv in memory]
            rows, like = beams * src.shape[0], self._target_embedding().weight
            caches = new_caches(self.config, self.tgt_windows, rows, capacity, like)
        return DecoderState(memory, self._real(src), caches)

    def decode(self, tgt: Tensor, state: DecoderState, *, last: bool = False) -> Tensor:
        """Logits [R, T, tgt_vocab] of the token after each of tgt [R, T]; ``last``: of one only.

        If the state has caches, tgt holds the tokens that follow those given before, without
        padding, and is added to the caches.  Compiled with ``fullgraph=True`` all single steps
        share one graph.
        """
        self._check_tokens("tgt", tgt)
        keep = None
        if state.caches:
            steps = torch.arange(tgt.shape[1], device=tgt.device)
            positions = state.caches[0].lengths[:, None] + steps
        else:
            keep = self._real(tgt)
            positions = positions_in(keep)
        x = self._embed(self._target_embedding(), self.tgt_positions, tgt, positions)
        seen = sights(
            self.config,
            self.tgt_positions,
            x,
            positions,
            self.tgt_windows,
            causal=True,
            keep=keep,
            caches=state.caches,
        )
        source = Sight(mask=key_padding(state.keep))
        for block, sight, kv in zip(self.decoder, seen, state.memory, strict=True):
            x = block(x, sight, kv, source)
        x = self.decoder_norm(x[:, -1:] if last else x)
        weight = self._target_embedding().weight if self.output is None else self.output.weight
        return F.linear(x, weight)

    @torch.no_grad()
    def session(
        self, src: Tensor, *, capacity: int | None = None, use_cache: bool = True
    ) -> Session:
        """Encode src [B, S], for :mod:`attnkit.models.generation`; call it in eval mode.

        Its first ``extend`` takes ``bos_id`` for each source.

        Args:
            src: int64 [B, S], padded on either side.
            capacity: the most tokens that the caches hold, ``bos`` included; None is
                ``config.max_length``.
            use_cache: keep keys and values; without, each step decodes the whole prefix anew.
        """
        capacity = self._capacity(capacity)
        return _Session(self, self.start(src, capacity=capacity if use_cache else None))

    def generate(
        self,
        src: Tensor,
        max_length: int | None = None,
        *,
        use_cache: bool = True,
        **options: Any,
    ) -> GenerationOutput:
        """Translate src [B, S], greedily unless the options say otherwise.  Dropout is off.

        Args:
            src: int64, padded on either side.
            max_length: the most tokens to generate, ``eos_id`` included; None is the config's.
            use_cache: as in :meth:`session`.
            options: of :class:`attnkit.models.GenerationOptions`, such as ``num_beams``;
                ``eos_id`` and ``pad_id`` are the config's unless given.

        Returns:
            Tokens [B, T], T <= max_length, without ``bos_id``, padded after ``eos_id``; scores [B];
            lengths [B]; log_probs [B, T].  A row that never ends has exactly ``max_length`` tokens.
        """
        return self._generate(*self._start(src, max_length, use_cache, options))

    def stream(
        self,
        src: Tensor,
        max_length: int | None = None,
        *,
        use_cache: bool = True,
        **options: Any,
    ) -> Iterator[Tensor]:
        """The tokens of :meth:`generate` as they come, int64 [B] each.

        The model is in eval mode from the first one to the last.
        """
        return self._stream(*self._start(src, max_length, use_cache, options))

    def _start(
        self, src: Tensor, max_length: int | None, use_cache: bool, options: dict[str, Any]
    ) -> tuple[Session, Tensor, GenerationOptions]:
        chosen = self._options(max_length, self.config.max_length, options)
        with evaluating(self):
            capacity = max(chosen.max_length, 1)
            session = self.session(src, capacity=capacity, use_cache=use_cache)
        bos = torch.full((src.shape[0], 1), cast(int, self.config.bos_id), device=src.device)
        return session, bos, chosen

    @torch.no_grad()
    def attention_maps(
        self,
        src: Tensor,
        tgt: Tensor,
        layer: int = -1,
        kind: Literal["cross", "self", "encoder"] = "cross",
    ) -> Tensor:
        """The weights [B, H, L, S] of one layer when the model scores tgt given src, no dropout.

        ``kind`` "cross": tgt to src, "self": tgt to tgt, "encoder": src to src.  They are
        recorded in a run of ``forward``; see :mod:`attnkit.recording` for more.
        """
        blocks = self.encoder if kind == "encoder" else self.decoder
        if kind not in ("cross", "self", "encoder"):
            raise ValueError(f"kind is {kind!r}, expected 'cross', 'self' or 'encoder'")
        if not -len(blocks) <= layer < len(blocks):
            raise ValueError(f"layer is {layer}, expected -{len(blocks)} to {len(blocks) - 1}")
        stack = "encoder" if kind == "encoder" else "decoder"
        module = "cross_attn" if kind == "cross" else "self_attn"
        wanted = f"{stack}.{layer % len(blocks)}.{module}"
        with evaluating(self), record(self, names=lambda name: name == wanted) as layers:
            self(src, tgt)
        return layers[0].weights()

    def _target_embedding(self) -> nn.Embedding:
        return self.src_embedding if self.tgt_embedding is None else self.tgt_embedding

    def _real(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self._keep(tokens))  # the config has a pad_id

    def _decoder_blocks(self) -> list[CrossBlock]:
        return [cast(CrossBlock, block) for block in self.decoder]


class _Session:
    """With caches each target token is run once; without, the whole prefix at each step."""

    def __init__(self, model: Seq2SeqTransformer, state: DecoderState) -> None:
        self.model, self.state = model, state
        self.prefix: Tensor | None = None

    @torch.no_grad()
    def extend(self, tokens: Tensor) -> Tensor:
        """See :class:`attnkit.models.generation.Session`."""
        if not self.state.caches:
            if self.prefix is not None:
                tokens = torch.cat((self.prefix, tokens), dim=1)
            self.prefix = tokens
        return self.model.decode(tokens, self.state, last=True)[:, 0]

    def reorder(self, rows: Tensor) -> None:
        """See :class:`attnkit.models.generation.Session`."""
        self.state.reorder(rows)
        if self.prefix is not None:
            self.prefix = self.prefix[rows]
