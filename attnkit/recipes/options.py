"""What a training run can be asked for: frozen dataclasses, read from flags and from a file.

A field made by :func:`option` says what it means and which values it takes; the command line, the
keys of a config file and every message about a wrong value come from that alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar


class UsageError(ValueError):
    """What was asked for cannot be done; the message is for whoever asked, without a traceback."""


Options = TypeVar("Options", bound="TrainingOptions")
_TYPE_NAMES = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}


def option(
    default: Any,
    help: str,  # the word that argparse has for it
    *,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that knows what it means and which values it takes."""
    meaning = {"help": help, "least": least, "most": most, "choices": choices}
    return dataclasses.field(default=default, metadata=meaning)


@dataclass(frozen=True)
class TrainingOptions:
    """How a model is trained; see the help of each field, or ``attnkit train lm --help``.

    Raises:
        UsageError: a value that a field does not take; the message names the field.
    """

    output: Path = option("runs/train", "folder of the run")
    seed: int = option(0, "of everything random", least=0)
    steps: int = option(1000, "the most optimizer steps", least=1)
    batch_tokens: int = option(4096, "tokens of a step's batch, padding included", least=1)
    accumulate: int = option(
        1, "parts in which a step's batch is computed one after the other, to save memory", least=1
    )
    learning_rate: float = option(1e-3, "the highest, at the end of the warm-up", least=0)
    schedule: str = option(
        "cosine", "fall of the learning rate after the warm-up", choices=("cosine", "inverse-sqrt")
    )
    warmup: int = option(100, "steps of linear rise", least=1)
    weight_decay: float = option(0.01, "of AdamW, on matrices only", least=0)
    clip: float = option(1.0, "the largest norm of the gradient", least=0)
    smoothing: float = option(0.0, "of the labels", least=0, most=1)
    precision: str = option(
        "fp32", "of the forward pass: bf16 is autocast", choices=("fp32", "bf16")
    )
    validate_every: int = option(100, "steps between two validations", least=1)
    patience: int = option(
        0, "validations without a new best after which training ends; 0: it goes on", least=0
    )
    checkpoint_every: int = option(200, "steps between two checkpoints", least=1)
    device: str = option("", "cpu, cuda, cuda:1, ...; empty: cuda if there is one")
    resume: bool = option(False, "go on from the checkpoint in the folder, if there is one")
    overwrite: bool = option(False, "replace the run in the folder")

    def __post_init__(self) -> None:
        kinds = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = _converted(field.name, getattr(self, field.name), kinds[field.name])
            object.__setattr__(self, field.name, value)
            _check_value(field, value)

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON has them."""
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_mapping(
        cls: type[Options], values: Mapping[str, Any], source: str = "options"
    ) -> Options:
        """The options with ``values`` in place of their defaults.

        Raises:
            UsageError: an unknown key, by name and with the nearest known one, or a wrong value.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
                raise UsageError(f"{source}: unknown key {key!r}{hint}")
        return cls(**values)

    @classmethod
    def from_command_line(
        cls: type[Options], flags: Mapping[str, Any], config: Path | None
    ) -> Options:
        """The options of a config file, if there is one, with ``flags`` laid over them."""
        values = {} if config is None else read_config(config)
        if config is not None:
            cls.from_mapping(values, str(config))  # a fault in the file is told as the file's
        return cls.from_mapping({**values, **flags})

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """A flag for each field; those not given leave no trace in the namespace."""
        kinds = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            kind, default = _without_none(kinds[field.name]), f" (default: {field.default})"
            if kind is bool or field.default in (None, ""):
                default = ""
            settings: dict[str, Any] = {"type": kind, "metavar": _metavar(kind)}
            if kind is bool:
                settings = {"action": argparse.BooleanOptionalAction}
            elif field.metadata["choices"]:
                settings = {"choices": field.metadata["choices"]}
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                dest=field.name,
                default=argparse.SUPPRESS,
                help=field.metadata["help"].replace("%", "%%") + default,
                **settings,
            )


def read_config(path: Path) -> dict[str, Any]:
    """The keys of a JSON or TOML file (by its suffix), with ``-`` in a key read as ``_``.

    Raises:
        UsageError: there is no such file, or it is neither, or TOML for a Python before 3.11.
    """
    if not path.is_file():
        raise UsageError(f"config {path} is not a file")
    text = path.read_text(encoding="utf-8")
    try:
        values = _parse_toml(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise UsageError(f"config {path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"config {path} holds {type(values).__name__}, expected keys and values")
    return {key.replace("-", "_"): value for key, value in values.items()}


def _parse_toml(text: str) -> dict[str, Any]:
    try:
        tomllib = importlib.import_module("tomllib")
    except ImportError:
        raise ValueError("TOML needs Python 3.11 or newer; JSON is always read") from None
    return dict(tomllib.loads(text))


def _without_none(kind: Any) -> Any:
    """``X`` of ``X | None``; any other type as it is."""
    if isinstance(kind, types.UnionType):
        return next(part for part in typing.get_args(kind) if part is not type(None))
    return kind


def _metavar(kind: Any) -> str:
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")


def _converted(name: str, value: Any, kind: Any) -> Any:
    """``value`` in the field's type: a path from text, a float from an integer; else it raises."""
    wanted = _without_none(kind)
    if value is None and wanted is not kind:
        return None
    if wanted is Path and isinstance(value, str | Path):
        return Path(value)
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:  # True is no integer here
        raise UsageError(f"{name} is {value!r}, expected {_TYPE_NAMES.get(wanted, 'a path')}")
    return value


def _check_value(field: dataclasses.Field[Any], value: Any) -> None:
    limits = field.metadata
    least, most, choices = limits["least"], limits["most"], limits["choices"]
    if choices and value not in choices:
        raise UsageError(f"{field.name} is {value!r}, expected one of {', '.join(choices)}")
    if value is None or (least is None and most is None):
        return
    # written so that NaN is refused
    if least is not None and not value >= least:
        raise UsageError(f"{field.name} is {value}, expected {least:g} or more")
    if most is not None and not value <= most:
        raise UsageError(f"{field.name} is {value}, expected {most:g} or less")
