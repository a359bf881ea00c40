"""``attnkit train translate``: an encoder-decoder for any parallel text, measured in BLEU and chrF.

loss = label-smoothed cross entropy of each target subword given the source and those before it
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attnkit.models import Seq2SeqConfig, Seq2SeqTransformer
from attnkit.recipes import runs, texts
from attnkit.recipes.batches import Examples, pad_batch
from attnkit.recipes.options import TrainingOptions, UsageError, option
from attnkit.recipes.runs import Run
from attnkit.recipes.subwords import BOS_ID, EOS_ID, PAD_ID, Subwords
from attnkit.recipes.training import Task

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "an encoder-decoder that translates; by default, dates into 14 languages"
MODULES = ("tokenizers", "rich", "matplotlib", "sacrebleu")
_SHOWN = 4  # translations printed at the end

Pair = tuple[str, str]


@dataclass(frozen=True)
class Options(TrainingOptions):
    """What ``attnkit train translate`` takes."""

    output: Path = option("runs/translate", "folder of the run")
    source: Path | None = option(None, "text to translate from, a sentence a line")
    target: Path | None = option(None, "text to translate to, line by line that of --source")
    held_out: float = option(
        0.05, "share of the lines kept for validation, and again for the test", least=0, most=0.4
    )
    vocab_size: int = option(1200, "subwords, of both languages together", least=Subwords.LEAST)
    max_length: int = option(64, "tokens of a sentence; longer pairs are left out", least=2)
    num_beams: int = option(4, "of the beam search in the test", least=1)
    d_model: int = option(128, "width of the model", least=1)
    num_heads: int = option(4, "attention heads", least=1)
    num_layers: int = option(2, "layers of the encoder, and of the decoder", least=1)
    d_ff: int = option(256, "inner width of the feed-forward networks", least=1)
    dropout: float = option(0.0, "everywhere in the model", least=0, most=1)
    dates: int = option(20000, "pairs of the default data", least=20)
    steps: int = option(900, "the most optimizer steps", least=1)
    batch_tokens: int = option(2048, "tokens of a step's batch, padding included", least=1)
    learning_rate: float = option(3e-3, "the highest, at the end of the warm-up", least=0)
    smoothing: float = option(0.1, "of the labels", least=0, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.source is None) != (self.target is None):
            given, other = ("source", "target") if self.target is None else ("target", "source")
            raise UsageError(f"{given} is given without {other}: a translation needs both")


def main(options: Options, console: Console) -> int:
    """Train, translate the test lines, print BLEU and chrF; the exit status."""
    pairs = read_pairs(options)
    with runs.started(options, console) as run:
        sources = [source for source, _ in pairs]
        parts = texts.parted(sources, [1] * len(pairs), options.seed, options.held_out)
        subwords = run.subwords(
            (text for i in parts.training for text in pairs[i]), options.vocab_size
        )
        training, validation, test = ([pairs[i] for i in part] for part in parts)
        task = Task(
            encoded(training, subwords, options.max_length),
            encoded(validation, subwords, options.max_length),
            logits=lambda model, batch: model(batch[0], batch[1][:, :-1]),
            targets=lambda batch: batch[1][:, 1:],
            ignore_index=PAD_ID,
        )
        model = run.build(lambda: build(options, subwords.vocab_size))
        run.train(model, task)
        if run.processes.first:
            report(run, model, subwords, test, options)
    return 0


def report(
    run: Run,
    model: Seq2SeqTransformer,
    subwords: Subwords,
    test: Sequence[Pair],
    options: Options,
) -> None:
    """Translate the test sentences and print what came out."""
    from sacrebleu.metrics import BLEU, CHRF

    sources, references = zip(*test, strict=True)
    found = translate(model, subwords, sources, num_beams=options.num_beams)
    for source, text, reference in list(zip(sources, found, references, strict=True))[:_SHOWN]:
        run.say(f"{source}\n  -> {text}" + ("" if text == reference else f"\n  != {reference}"))
    exact = sum(map(str.__eq__, found, references)) / len(found)
    bleu = BLEU().corpus_score(found, [list(references)]).score
    chrf = CHRF().corpus_score(found, [list(references)]).score
    run.say(
        f"BLEU {bleu:.1f}  chrF {chrf:.1f}  exact {100 * exact:.1f}%  "
        f"on {len(found)} held-out sentences, {options.num_beams} beams"
    )


def read_pairs(options: Options) -> list[Pair]:
    """The sentence pairs of the two files, or dates in words if no file is given.

    Raises:
        UsageError: a file that is missing or empty, or different numbers of lines.
    """
    if options.source is None or options.target is None:
        return date_pairs(options.dates, options.seed)
    sides = [
        texts.read_lines(path, f"--{name}")
        for name, path in (("source", options.source), ("target", options.target))
    ]
    if len(sides[0]) != len(sides[1]):
        raise UsageError(
            f"--source {options.source} has {len(sides[0])} lines, --target {options.target} has "
            f"{len(sides[1])}: expected the same number, line n being the translation of line n"
        )
    pairs = [(source, target) for source, target in zip(*sides, strict=True) if source and target]
    if not pairs:
        raise UsageError("no line has text in both --source and --target")
    return pairs


def date_pairs(count: int, seed: int) -> list[Pair]:
    """``count`` dates, each in English and in one of the demo's languages, drawn by ``seed``."""
    from attnkit.recipes.dates import LANGUAGES, sample_examples, split_dates

    days = split_dates(seed, validation=0, test=0).train[:count]  # a date occurs once
    rng = random.Random(seed)
    examples = [example for day in days for example in sample_examples([day], 1, rng)]
    return [(f"{LANGUAGES[e.language]}: {e.source}", e.target) for e in examples]


def encoded(pairs: Sequence[Pair], subwords: Subwords, max_length: int) -> Examples:
    """Token rows ``source <eos>`` and ``<bos> target <eos>``, without pairs that are too long."""
    sources, targets = (subwords.encode(side) for side in zip(*pairs, strict=True))
    rows = [
        ([*source, EOS_ID], [BOS_ID, *target, EOS_ID])
        for source, target in zip(sources, targets, strict=True)
        if max(len(source), len(target) + 1) < max_length
    ]
    if not rows:
        raise UsageError(f"max_length is {max_length}, and every sentence pair is longer")
    return Examples(([source for source, _ in rows], [target for _, target in rows]), PAD_ID)


def build(options: Options, vocab_size: int) -> Seq2SeqTransformer:
    """An untrained Pre-Norm model with one embedding for source, target and output."""
    return Seq2SeqTransformer(
        Seq2SeqConfig(
            src_vocab=vocab_size,
            tgt_vocab=vocab_size,
            d_model=options.d_model,
            num_heads=options.num_heads,
            num_encoder_layers=options.num_layers,
            num_decoder_layers=options.num_layers,
            d_ff=options.d_ff,
            dropout=options.dropout,
            max_length=options.max_length,
            norm_first=True,
            tie_embeddings=True,
            share_embeddings=True,
            pad_id=PAD_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
        )
    )


def translate(
    model: Seq2SeqTransformer,
    subwords: Subwords,
    sources: Sequence[str],
    *,
    num_beams: int = 4,
    batch_size: int = 128,
) -> list[str]:
    """The translation of each source; a source is cut at the model's ``max_length``."""
    limit = model.config.max_length - 1
    rows = [[*row[:limit], EOS_ID] for row in subwords.encode(sources)]
    # neighbours of one length: a batch is over when its longest translation is
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    device = next(model.parameters()).device
    found: dict[int, str] = {}
    for start in range(0, len(order), batch_size):
        some = order[start : start + batch_size]
        batch = pad_batch([rows[i] for i in some], PAD_ID).to(device)
        tokens: torch.Tensor = model.generate(batch, num_beams=num_beams).tokens
        found.update(zip(some, map(subwords.decode, tokens.tolist()), strict=True))
    return [found[i] for i in range(len(rows))]
