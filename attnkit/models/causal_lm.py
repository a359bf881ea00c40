"""p(y) = prod_t p(y_t | y_<t): a decoder alone, the model of text and of all that is like it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnkit.models.config import TransformerConfig
from attnkit.models.generation import GenerationOptions, GenerationOutput, Session
from attnkit.models.generative import GenerativeModel
from attnkit.models.layers import (
    Block,
    Cache,
    new_caches,
    norm_of,
    positions_in,
    positions_of,
    sights,
)


class CausalLM(GenerativeModel):
    """Causal blocks, a norm and an output projection over token ids.

    Padding is told by ``config.pad_id``, on either side: positions count real tokens, so that a
    sequence gives what it gives alone.
    """

    config: TransformerConfig
    config_class = TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        if config.num_classes is not None:
            raise config.wrong("num_classes", "None for a CausalLM")
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = positions_of(config, causal=True)
        self.windows = config.windows(config.num_layers)
        self.layers = nn.ModuleList(Block(config, window) for window in self.windows)
        self.norm = norm_of(config)
        self.output = (
            None
            if config.tie_embeddings
            else nn.Linear(config.d_model, config.vocab_size, bias=False)
        )
        self._initialise()

    def forward(self, tokens: Tensor, *, last: bool = False) -> Tensor:
        """Logits [B, T, vocab_size] of the token after each of tokens; ``last``: of one only.

        Args:
            tokens: int64 [B, T], padded with ``pad_id`` on either side; the loss is taken against
                the same sequence one token on.
            last: only of the last column, [B, 1, vocab_size].

        Raises:
            ValueError: another shape or dtype, or more tokens than ``max_length``.
        """
        self._check_tokens("tokens", tokens)
        keep = self._keep(tokens)
        if keep is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        else:
            positions = positions_in(keep)
        x = self._blocks(tokens, positions, keep=keep)
        return self._logits(x[:, -1:] if last else x)

    def start(self, batch: int, capacity: int) -> list[Cache]:
        """Empty caches, one per layer, for :meth:`decode`: ``batch`` rows of ``capacity`` tokens.

        A layer with a window has a ring of that size, if its positions allow it.
        """
        return new_caches(self.config, self.windows, batch, capacity, self.embedding.weight)

    def decode(
        self,
        tokens: Tensor,
        caches: Sequence[Cache],
        *,
        counts: Tensor | None = None,
        last: bool = False,
    ) -> Tensor:
        """Add tokens to the caches; logits [R, n, vocab_size] of what follows each of them.

        Compiled with ``fullgraph=True`` all single steps share one graph.

        Args:
            tokens: int64 [R, n]; they follow those given before.
            caches: from :meth:`start`.
            counts: int32 [R]; then only the first ``counts[r]`` of row r are tokens, the others
                padding.
            last: only the logits after each row's last token, [R, 1, vocab_size].
        """
        self._check_tokens("tokens", tokens)
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        positions = caches[0].lengths[:, None] + steps
        x = self._blocks(tokens, positions, caches=caches, counts=counts)
        if last and counts is not None:
            rows = torch.arange(tokens.shape[0], device=tokens.device)
            x = x[rows, (counts.long() - 1).clamp(min=0)][:, None]
        elif last:
            x = x[:, -1:]
        return self._logits(x)

    def session(self, *, capacity: int | None = None, use_cache: bool = True) -> Session:
        """A session for :mod:`attnkit.models.generation`; call it in eval mode.

        Its first ``extend`` takes the prompts, padded on either side; each row goes on after its
        last real token.

        Args:
            capacity: the most tokens that the caches hold, the padded prompt included; None is
                ``config.max_length``.
            use_cache: keep keys and values; without, each step runs over the whole prefix anew.
        """
        capacity = self._capacity(capacity)
        return _CachedSession(self, capacity) if use_cache else _PlainSession(self)

    def generate(
        self,
        prompt: Tensor,
        max_length: int | None = None,
        *,
        use_cache: bool = True,
        **options: Any,
    ) -> GenerationOutput:
        """Go on from prompt int64 [B, T], padded on either side.  Dropout is off.

        Args:
            prompt: one real token or more in each row.
            max_length: the most tokens to generate; None: what ``config.max_length`` has room for.
            use_cache: as in :meth:`session`.
            options: of :class:`attnkit.models.GenerationOptions`; ``eos_id`` and ``pad_id`` are the
                config's unless given.
        """
        return self._generate(*self._start(prompt, max_length, use_cache, options))

    def stream(
        self,
        prompt: Tensor,
        max_length: int | None = None,
        *,
        use_cache: bool = True,
        **options: Any,
    ) -> Iterator[Tensor]:
        """The tokens of :meth:`generate` as they come, int64 [B] each.

        The model is in eval mode until the last one was taken.
        """
        return self._stream(*self._start(prompt, max_length, use_cache, options))

    def _start(
        self, prompt: Tensor, max_length: int | None, use_cache: bool, options: dict[str, Any]
    ) -> tuple[Session, Tensor, GenerationOptions]:
        self._check_tokens("prompt", prompt)
        width = prompt.shape[1]
        chosen = self._options(max_length, self.config.max_length - width + 1, options)
        # the last token generated is not fed
        capacity = max(width + chosen.max_length - 1, 1)
        return self.session(capacity=capacity, use_cache=use_cache), prompt, chosen

    def _blocks(
        self,
        tokens: Tensor,
        positions: Tensor,
        *,
        keep: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        x = self._embed(self.embedding, self.positions, tokens, positions)
        seen = sights(
            self.config,
            self.positions,
            x,
            positions,
            self.windows,
            causal=True,
            keep=keep,
            caches=caches,
            counts=counts,
        )
        for block, sight in zip(self.layers, seen, strict=True):
            x = block(x, sight)
        return x

    def _logits(self, x: Tensor) -> Tensor:
        table = self.embedding if self.output is None else self.output
        return F.linear(self.norm(x), cast(Tensor, table.weight))

    def _real_tokens(self, prompt: Tensor) -> Tensor:
        """Which tokens of a prompt [B, T] are no padding: bool [B, T].

        Raises:
            ValueError: another shape or dtype, or a row of padding alone.
        """
        self._check_tokens("prompt", prompt)
        keep = self._keep(prompt)
        if keep is None:
            return torch.ones_like(prompt, dtype=torch.bool)
        empty = (~keep.any(dim=1)).nonzero().flatten().tolist()
        if empty or not prompt.shape[1]:
            raise ValueError(f"prompt has no token in rows {empty}, expected 1 or more in each")
        return keep


class _CachedSession:
    """Each token is run once.  Prompts are moved to the left: a row's slots are its positions."""

    def __init__(self, model: CausalLM, capacity: int) -> None:
        self.model, self.capacity = model, capacity
        self.caches: list[Cache] | None = None

    @torch.no_grad()
    def extend(self, tokens: Tensor) -> Tensor:
        """See :class:`attnkit.models.generation.Session`."""
        counts = None
        if self.caches is None:
            keep = self.model._real_tokens(tokens)
            self.caches = self.model.start(tokens.shape[0], self.capacity)
            if not bool(keep.all()):
                tokens = tokens.gather(1, keep.byte().argsort(dim=1, stable=True, descending=True))
                counts = keep.sum(dim=1, dtype=torch.int32)
        return self.model.decode(tokens, self.caches, counts=counts, last=True)[:, 0]

    def reorder(self, rows: Tensor) -> None:
        """See :class:`attnkit.models.generation.Session`."""
        for cache in self.caches or ():
            cache.reorder(rows)


class _PlainSession:
    """The whole prefix is run anew at each step.  Prompts are moved to the right."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.prefix: Tensor | None = None

    @torch.no_grad()
    def extend(self, tokens: Tensor) -> Tensor:
        """See :class:`attnkit.models.generation.Session`."""
        if self.prefix is None:
            order = self.model._real_tokens(tokens).byte().argsort(dim=1, stable=True)
            self.prefix = tokens.gather(1, order)
        else:
            self.prefix = torch.cat((self.prefix, tokens), dim=1)
        return self.model(self.prefix, last=True)[:, 0]

    def reorder(self, rows: Tensor) -> None:
        """See :class:`attnkit.models.generation.Session`."""
        if self.prefix is not None:
            self.prefix = self.prefix[rows]
