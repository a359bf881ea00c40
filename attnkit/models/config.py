"""What a model is made of, as frozen values that are checked once and travel as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeVar

C = TypeVar("C", bound="ModelConfig")

POSITIONS = ("sinusoidal", "learned", "rope", "alibi", "relative", "none")


class _Sizes:
    """What every configuration has, each at its own place in the order of arguments."""

    d_model: int
    num_heads: int
    d_ff: int | None


@dataclass(frozen=True, kw_only=True)
class ModelConfig(_Sizes):
    """What all models share; every wrong value is a ValueError that names the field.

    Args:
        num_kv_heads: heads of keys and values in self-attention, a divisor of num_heads (grouped
            queries; 1 is multi-query); None is num_heads.
        dropout: of embeddings, attention weights, feed-forward networks and residual branches.
        activation: "relu", "gelu" or "swiglu".
        norm: "layer" or "rms".
        norm_first: Pre-Norm instead of the paper's Post-Norm.
        bias: whether linear layers and LayerNorms have biases.
        positions: "sinusoidal" or "learned", added to the embeddings; "rope", "alibi" or
            "relative" (T5's buckets, one table per stack), in self-attention; or "none".
        rope_theta: base of the rotary frequencies.
        rope_dim: leading dimensions of a head that are rotated, even; None: all.
        rope_interleaved: pairs are dimensions (2 i, 2 i + 1) instead of (i, i + rope_dim / 2).
        rope_scaling: None, "linear" (positions are divided by rope_factor) or "ntk" (rope_theta
            grows so that the lowest frequency is divided by rope_factor).
        rope_factor: 1 or more: by how much the context grows under rope_scaling.
        window: tokens that self-attention sees, the own one included: the last ``window`` in a
            causal stack, up to ``window - 1`` on either side in an encoder.  An int for all layers,
            or one entry per layer; None: no limit.
        max_length: the longest sequence in tokens.
        tie_embeddings: the output projection is the (target) embedding.
        pad_id, bos_id, eos_id: padding, first and last token, different ids; each None if there is
            no such token.
    """

    num_kv_heads: int | None = None
    dropout: float = 0.1
    activation: str = "relu"
    norm: str = "layer"
    norm_first: bool = False
    bias: bool = True
    positions: str = "sinusoidal"
    rope_theta: float = 10000.0
    rope_dim: int | None = None
    rope_interleaved: bool = False
    rope_scaling: str | None = None
    rope_factor: float = 1.0
    window: int | tuple[int | None, ...] | None = None
    max_length: int = 512
    tie_embeddings: bool = False
    pad_id: int | None = 0
    bos_id: int | None = 1
    eos_id: int | None = 2

    def __post_init__(self) -> None:
        self._integers("d_model", "num_heads", "max_length")
        self._integers("num_kv_heads", "d_ff", "rope_dim", optional=True)
        self._flags("norm_first", "bias", "rope_interleaved", "tie_embeddings")
        self._choice("activation", ("relu", "gelu", "swiglu"))
        self._choice("norm", ("layer", "rms"))
        self._choice("positions", POSITIONS)
        self._choice("rope_scaling", (None, "linear", "ntk"))
        self._number("dropout", 0.0, 1.0)
        self._number("rope_theta", 1.0)
        self._number("rope_factor", 1.0)
        if self.d_model % self.num_heads:
            raise self.wrong("d_model", f"a multiple of num_heads, {self.num_heads}")
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise self.wrong("num_kv_heads", f"a divisor of num_heads, {self.num_heads}")
        self._check_rope()
        self._check_window()

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values in self-attention."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def windows(self, num_layers: int) -> tuple[int | None, ...]:
        """The window of each of a stack's layers."""
        return self.window if isinstance(self.window, tuple) else (self.window,) * num_layers

    def to_json(self) -> str:
        """A JSON object, with a line for each field."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls: type[C], text: str) -> C:
        """What :meth:`to_json` wrote; fields that are absent have their defaults.

        Raises:
            ValueError: no JSON object, an unknown or a missing field, or a wrong value.
        """
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError(f"the configuration is {found!r}, expected a JSON object")
        known = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(found.keys() - known.keys())
        if unknown:
            raise ValueError(f"unknown fields {unknown}, expected those of {cls.__name__}")
        missing = [
            name
            for name, field in known.items()
            if field.default is dataclasses.MISSING and name not in found
        ]
        if missing:
            raise ValueError(f"fields {missing} are missing from the {cls.__name__}")
        return cls(**found)

    def wrong(self, name: str, expected: str) -> ValueError:
        """The error that field ``name`` deserves."""
        return ValueError(f"{name} is {getattr(self, name)!r}, expected {expected}")

    def _integers(self, *names: str, optional: bool = False) -> None:
        """Sizes: 1 or more."""
        for name in names:
            value = getattr(self, name)
            if optional and value is None:
                continue
            if type(value) is not int:
                raise self.wrong(name, "an int or None" if optional else "an int")
            if value < 1:
                raise self.wrong(name, "1 or more")

    def _flags(self, *names: str) -> None:
        for name in names:
            if type(getattr(self, name)) is not bool:
                raise self.wrong(name, "a bool")

    def _choice(self, name: str, known: Collection[str | None]) -> None:
        if getattr(self, name) not in known:
            raise self.wrong(name, f"one of {list(known)}")

    def _number(self, name: str, least: float, most: float = float("inf")) -> None:
        value = getattr(self, name)
        if type(value) not in (int, float):
            raise self.wrong(name, "a number")
        if not least <= value <= most or value == float("inf"):
            raise self.wrong(name, f"{least:g} to {most:g}" if most < 2 else f"{least:g} or more")

    def _special(self, vocab: str) -> None:
        """The special ids are different tokens of the vocabulary whose size is field ``vocab``."""
        size = getattr(self, vocab)
        special = {"pad_id": self.pad_id, "bos_id": self.bos_id, "eos_id": self.eos_id}
        given = {name: token for name, token in special.items() if token is not None}
        for name, token in given.items():
            if type(token) is not int or not 0 <= token < size:
                raise self.wrong(name, f"0 to {size - 1}, below {vocab}, or None")
        if len(set(given.values())) < len(given):
            raise ValueError(f"{given} are not {len(given)} different ids")

    def _check_rope(self) -> None:
        if self.positions != "rope":
            for field in dataclasses.fields(self):
                if field.name.startswith("rope_") and getattr(self, field.name) != field.default:
                    expected = f"{field.default!r} with positions {self.positions!r}"
                    raise self.wrong(field.name, expected)
            return
        rotated = self.head_dim if self.rope_dim is None else self.rope_dim
        if self.rope_dim is None and rotated % 2:
            raise self.wrong("head_dim", "an even number for 'rope': it is d_model / num_heads")
        if rotated % 2 or rotated > self.head_dim:
            raise self.wrong("rope_dim", f"an even number, at most head_dim, {self.head_dim}")
        if self.rope_scaling is None and self.rope_factor != 1.0:
            raise self.wrong("rope_factor", "1 unless rope_scaling says what to do with it")
        if self.rope_scaling == "ntk" and rotated < 4:
            raise self.wrong("rope_scaling", "None or 'linear' for fewer than 4 rotated dimensions")

    def _check_window(self) -> None:
        if isinstance(self.window, list):  # JSON has no tuples
            object.__setattr__(self, "window", tuple(self.window))
        entries = self.window if isinstance(self.window, tuple) else (self.window,)
        for entry in entries:
            if entry is not None and (type(entry) is not int or entry < 1):
                raise self.wrong("window", "None, an int of 1 or more, or a tuple of these")

    def _check_layers(self, *names: str) -> None:
        """Numbers of layers, and a window for each of them."""
        self._integers(*names)
        for name in names:
            layers = getattr(self, name)
            if isinstance(self.window, tuple) and len(self.window) != layers:
                raise self.wrong("window", f"{layers} entries, one for each of {name}")


@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    """A single stack: of a :class:`CausalLM` or a :class:`Classifier`.

    Args:
        vocab_size: number of token ids.
        d_ff: inner size of the feed-forward networks; None is ``4 * d_model``.
        num_classes: of a classifier; None for a language model.
        pooling: how a classifier makes one vector of a sequence: that of its "first" token, the
            "mean", or a learned query's "attention".
        The others: see :class:`ModelConfig`.
    """

    vocab_size: int
    d_model: int = 512
    num_heads: int = 8
    num_layers: int = 6
    d_ff: int | None = None
    num_classes: int | None = dataclasses.field(default=None, kw_only=True)
    pooling: str = dataclasses.field(default="mean", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._integers("vocab_size")
        self._integers("num_classes", optional=True)
        self._check_layers("num_layers")
        self._choice("pooling", ("first", "mean", "attention"))
        self._special("vocab_size")


@dataclass(frozen=True)
class Seq2SeqConfig(ModelConfig):
    """Sizes of a :class:`Seq2SeqTransformer`; the defaults are the base model of the paper.

    Args:
        src_vocab, tgt_vocab: numbers of token ids.
        d_ff: inner size of the feed-forward networks; None is ``4 * d_model``.
        share_embeddings: source and target have one embedding (and one vocabulary).

    The others: see :class:`ModelConfig`.  ``max_length`` counts ``bos``; all three special ids are
    needed; ``num_kv_heads``, ``positions`` and ``window`` are those of self-attention in encoder
    and decoder, whereas cross-attention has ``num_heads`` heads and sees everything.
    """

    src_vocab: int
    tgt_vocab: int
    d_model: int = 512
    num_heads: int = 8
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    d_ff: int | None = 2048
    share_embeddings: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._integers("src_vocab", "tgt_vocab")
        self._flags("share_embeddings")
        self._check_layers("num_encoder_layers", "num_decoder_layers")
        if self.share_embeddings and self.src_vocab != self.tgt_vocab:
            raise ValueError(
                f"share_embeddings needs one vocabulary: src_vocab is {self.src_vocab}, "
                f"tgt_vocab is {self.tgt_vocab}"
            )
        self._special("tgt_vocab")
        for name in ("pad_id", "bos_id", "eos_id"):
            if getattr(self, name) is None:
                raise self.wrong(name, f"0 to {self.tgt_vocab - 1}, below tgt_vocab")
        assert self.pad_id is not None
        if self.pad_id >= self.src_vocab:
            raise self.wrong("pad_id", f"less than src_vocab, {self.src_vocab}")
