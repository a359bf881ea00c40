"""``attnkit heatmap``: where the heads of a trained model look while it reads one text."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from attnkit import viz
from attnkit.models import CausalLM, Classifier, Seq2SeqTransformer
from attnkit.recipes.generate import load
from attnkit.recipes.options import UsageError
from attnkit.recipes.subwords import BOS_ID, EOS_ID, SPECIAL, Subwords
from attnkit.recording import RecordedAttention, record

Model = CausalLM | Classifier | Seq2SeqTransformer

MODELS: dict[str, type[Model]] = {
    "CausalLM": CausalLM,
    "Classifier": Classifier,
    "Seq2SeqTransformer": Seq2SeqTransformer,
}
_PLACES = {  # of each kind: the names of its modules
    "cross": r"decoder\.\d+\.cross_attn",
    "self": r"(decoder|layers)\.\d+\.self_attn",
    "encoder": r"encoder\.\d+\.self_attn",
}
_SHORT = 48  # tokens that still have a label each
_POOLED, _SMALL = 256, 64  # bins of a longer text: in the maps of one layer, in those of all
_WHITE = str.maketrans({" ": "\u2423", "\n": "\u21b5", "\t": "\u21e5"})


class Reading(NamedTuple):
    """What was recorded: a layer's attention each, and the tokens of its queries and keys."""

    layers: list[RecordedAttention]
    rows: list[str]
    columns: list[str]


def main(options: argparse.Namespace) -> int:
    """Write the pictures and say where they are; the exit status."""
    model, words = load(options.model, options.device, MODELS)
    if options.head is not None and options.layer is None:
        raise UsageError(f"--head {options.head} is given without --layer")
    reading = read(model, words, options.text, options.target, options.kind)
    for path in draw(reading, options.layer, options.head, options.output):
        print(path)
    return 0


@torch.no_grad()
def read(model: Model, words: Subwords, text: str, target: str | None, kind: str | None) -> Reading:
    """The attention of one kind in all layers while ``model`` reads ``text``.

    Args:
        model: in eval mode.
        words: its vocabulary.
        text: of a translation, the source.
        target: the translation; None: the model's own, greedily chosen.
        kind: "cross", "self" or "encoder"; None: "cross" of a translation, else "self".

    Raises:
        UsageError: a kind that the model lacks, a target of no translation, too long a text.
    """
    translates = isinstance(model, Seq2SeqTransformer)
    known = tuple(_PLACES) if translates else ("self",)
    kind = known[0] if kind is None else kind
    if kind not in known:
        raise UsageError(f"--kind {kind}: a {type(model).__name__} has {', '.join(known)} only")
    if target is not None and not translates:
        raise UsageError(f"--target is for translations: the model is a {type(model).__name__}")

    (row,) = words.encode([text])
    before = [] if translates else [BOS_ID]
    after = [] if isinstance(model, CausalLM) else [EOS_ID]
    source = _tensor("--text", [*before, *row, *after], model)
    inputs = [source]
    if isinstance(model, Seq2SeqTransformer):
        if target is None:
            (written,) = model.generate(source, model.config.max_length - 1).tokens.tolist()
        else:
            (written,) = words.encode([target])
        goal = [BOS_ID, *(token for token in written if token != EOS_ID)]
        inputs.append(_tensor("--target", goal, model))
    with record(model, lambda name: re.fullmatch(_PLACES[kind], name) is not None) as layers:
        model(*inputs)
    queries = inputs[0] if kind == "encoder" else inputs[-1]
    keys = inputs[-1] if kind == "self" else inputs[0]
    return Reading(layers, _labels(words, queries), _labels(words, keys))


def draw(reading: Reading, layer: int | None, head: int | None, path: Path) -> list[Path]:
    """The pictures of a layer or of one head; of all layers, with what their heads do, if None.

    Raises:
        UsageError: a layer or a head that is not there.
    """
    lengths = len(reading.rows), len(reading.columns)
    if layer is None:
        names = [f"layer {index}" for index in range(len(reading.layers))]
        pooled = [one.pooled(_SMALL)[0] for one in reading.layers]
        done = [[value[0] for value in one.summary()] for one in reading.layers]
        beside = path.with_name(f"{path.stem}-summary{path.suffix}")
        return [
            viz.head_grid(list(zip(names, pooled, strict=True)), path, length=lengths),
            viz.head_summary(list(zip(names, done, strict=True)), beside),
        ]

    one = reading.layers[_index("--layer", layer, len(reading.layers))]
    heads = list(range(one.shape[1]))
    if head is not None:
        heads = [_index("--head", head, len(heads))]
    title = f"{one.name}, {one.kind}-attention"
    if max(lengths) > _SHORT:
        binned = one.pooled(_POOLED)[0, heads]
        return [viz.head_grid([("", binned)], path, length=lengths, heads=heads, title=title)]
    maps = [
        viz.HeatMap(f"head {number}", weights, reading.rows, reading.columns)
        for number, weights in zip(heads, one.weights(heads=heads)[0], strict=True)
    ]
    return [viz.heat_maps(maps, path, title=title)]


def _tensor(name: str, row: Sequence[int], model: Model) -> torch.Tensor:
    limit = model.config.max_length
    if len(row) > limit:
        raise UsageError(
            f"{name} has {len(row)} tokens, special ones included, expected at most {limit}, all "
            "that the model can look at"
        )
    return torch.tensor([row], device=next(model.parameters()).device)


def _labels(words: Subwords, tokens: torch.Tensor) -> list[str]:
    """The text of each token of [1, L], white space made visible."""
    return [
        SPECIAL[token] if token < len(SPECIAL) else words.decode([token]).translate(_WHITE)
        for token in tokens[0].tolist()
    ]


def _index(name: str, index: int, count: int) -> int:
    if not -count <= index < count:
        raise UsageError(f"{name} is {index}, expected {-count} to {count - 1}")
    return index % count
