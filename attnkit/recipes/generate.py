"""``attnkit generate``: text from the model of a run, as it is written."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from attnkit.models import CausalLM, Seq2SeqTransformer
from attnkit.models.pretrained import PretrainedModel
from attnkit.recipes import runs, subwords
from attnkit.recipes.options import UsageError
from attnkit.recipes.subwords import BOS_ID, EOS_ID, Subwords

M = TypeVar("M", bound=PretrainedModel)

MODELS: dict[str, type[CausalLM | Seq2SeqTransformer]] = {
    "CausalLM": CausalLM,
    "Seq2SeqTransformer": Seq2SeqTransformer,
}


def main(options: argparse.Namespace) -> int:
    """Print the prompt of a language model and what follows it, piece by piece; the exit status."""
    model, words = load(options.model, options.device, MODELS)
    if isinstance(model, CausalLM):
        print(options.prompt, end="", flush=True)
    for piece in pieces(model, words, options):
        print(piece, end="", flush=True)
    print()
    return 0


def load(folder: Path, device: str, models: Mapping[str, type[M]]) -> tuple[M, Subwords]:
    """The model and the subwords of a run's folder, or of its folder ``model``.

    Raises:
        UsageError: the folder holds no model, or one whose name is not among ``models``.
    """
    place = folder / runs.MODEL if (folder / runs.MODEL).is_dir() else folder
    for file in ("config.json", "model.safetensors", subwords.FILE):
        if not (place / file).is_file():
            raise UsageError(f"--model {folder}: {place / file} is missing; was it trained to end?")
    kind = json.loads((place / "config.json").read_text(encoding="utf-8")).get("model")
    if kind not in models:
        raise UsageError(f"--model {folder} is a {kind}, expected one of {', '.join(models)}")
    return models[kind].from_pretrained(place, device), Subwords.load(place)


def pieces(
    model: CausalLM | Seq2SeqTransformer, words: Subwords, options: argparse.Namespace
) -> Iterator[str]:
    """The generated text, in pieces as they come; in one where beams keep it open to the end."""
    (row,) = words.encode([options.prompt])
    row = [BOS_ID, *row] if isinstance(model, CausalLM) else [*row, EOS_ID]
    if len(row) >= model.config.max_length:
        raise UsageError(
            f"--prompt has {len(row)} tokens, expected fewer than {model.config.max_length}, all "
            "that the model can look at"
        )
    prompt = torch.tensor([row], device=next(model.parameters()).device)
    chosen: dict[str, Any] = {"num_beams": options.num_beams}
    if not (options.temperature is options.top_k is options.top_p is None):
        temperature = 1.0 if options.temperature is None else options.temperature
        chosen.update(sample=True, temperature=temperature, seed=options.seed)
        chosen.update(top_k=options.top_k, top_p=options.top_p)
    try:
        if options.num_beams > 1:
            yield words.decode(
                model.generate(prompt, options.max_length, **chosen).tokens[0].tolist()
            )
            return
        tokens = model.stream(prompt, options.max_length, **chosen)
    except (ValueError, TypeError) as error:  # its own words name the option
        raise UsageError(str(error)) from error
    ids: list[int] = []
    told = ""
    for token in tokens:
        ids.append(int(token[0]))
        text = words.decode(ids)
        if not text.endswith("\ufffd"):  # the bytes of a character come one after the other
            yield text.removeprefix(told)
            told = text
    yield words.decode(ids).removeprefix(told)
