"""A model on disk: safetensors and JSON, each file replaced whole or not at all; never a pickle."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, TypeVar, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attnkit.models.config import ModelConfig
from attnkit.models.layers import Attention
from attnkit.nn import LearnedPositionalEncoding, SinusoidalPositionalEncoding

M = TypeVar("M", bound="PretrainedModel")


class PretrainedModel(nn.Module):
    """What the models have in common: a configuration, embeddings of tokens, saving and loading."""

    config: ModelConfig
    config_class: ClassVar[type[ModelConfig]]

    def __init__(self, config: ModelConfig) -> None:
        if not isinstance(config, self.config_class):
            raise TypeError(
                f"config is a {type(config).__name__}, expected a {self.config_class.__name__}"
            )
        super().__init__()
        self.config = config

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write ``model.safetensors`` and ``config.json``, each replaced whole or not at all."""
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        fields = {"model": type(self).__name__, **json.loads(self.config.to_json())}
        state = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        with _replacing(path / "model.safetensors") as temporary:
            save_file(state, temporary)
        with _replacing(path / "config.json") as temporary:
            temporary.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(
        cls: type[M], directory: str | os.PathLike[str], device: torch.device | str = "cpu"
    ) -> M:
        """What :meth:`save_pretrained` wrote, in the dtype of its weights and in eval mode.

        Raises:
            ValueError: the folder holds another model, or a configuration with a wrong or unknown
                field.
            RuntimeError: weights that are not those of the configuration.
        """
        path = Path(directory)
        fields = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if isinstance(fields, dict):
            kind = fields.pop("model", cls.__name__)
            if kind != cls.__name__:
                raise ValueError(f"{path} holds a {kind}, expected a {cls.__name__}")
        config = cls.config_class.from_json(json.dumps(fields))
        state = load_file(path / "model.safetensors", device=str(device))
        model = cls(config).to(device=device, dtype=next(iter(state.values())).dtype)
        model.load_state_dict(state)
        return model.eval()

    def _initialise(self) -> None:
        """Glorot-uniform matrices; embeddings of unit variance once scaled by sqrt(d_model)."""
        parts = list(self.children())
        for part in parts:
            if isinstance(part, nn.ModuleList | nn.Linear | Attention):
                for parameter in part.parameters():
                    if parameter.dim() > 1:
                        nn.init.xavier_uniform_(parameter)
        for part in parts:
            if isinstance(part, nn.Embedding):
                nn.init.normal_(part.weight, std=self.config.d_model**-0.5)

    def _embed(
        self, table: nn.Embedding, encoding: nn.Module | None, tokens: Tensor, positions: Tensor
    ) -> Tensor:
        """Embeddings [B, L, E], scaled, with positions if these are added, after dropout."""
        x = table(tokens) * math.sqrt(self.config.d_model)
        if isinstance(encoding, SinusoidalPositionalEncoding | LearnedPositionalEncoding):
            x = encoding(x, positions)
        return cast(Tensor, F.dropout(x, self.config.dropout, self.training))

    def _keep(self, tokens: Tensor) -> Tensor | None:
        """Which tokens are real; None: all."""
        return None if self.config.pad_id is None else tokens != self.config.pad_id

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
        if not tokens.is_cpu or not tokens.numel() or torch.compiler.is_compiling():
            return  # to look at them would make a GPU wait
        field = {"src": "src_vocab", "tgt": "tgt_vocab"}.get(name, "vocab_size")
        low, high = (int(end) for end in tokens.aminmax())
        if low < 0 or high >= getattr(self.config, field):
            raise IndexError(
                f"{name} holds ids from {low} to {high}, expected 0 to "
                f"{getattr(self.config, field) - 1}: the config's {field} is "
                f"{getattr(self.config, field)}"
            )


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
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
