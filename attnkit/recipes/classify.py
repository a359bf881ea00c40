"""``attnkit train classify``: an encoder that tells the class of a text.

loss = label-smoothed cross entropy of the label given the text
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attnkit import viz
from attnkit.models import Classifier, TransformerConfig
from attnkit.recipes import runs, texts
from attnkit.recipes.batches import Examples, token_batches
from attnkit.recipes.options import TrainingOptions, UsageError, option
from attnkit.recipes.runs import Run
from attnkit.recipes.subwords import BOS_ID, EOS_ID, PAD_ID, Subwords
from attnkit.recipes.training import Task

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "a classifier of texts; by default, of names by the language they are written in"
MODULES = ("tokenizers", "rich", "matplotlib", "babel")
TASKS = ("languages", "both-tokens")
LABELS_FILE = "labels.txt"

LANGUAGES = {
    "am": "Amharic",
    "ar": "Arabic",
    "bn": "Bengali",
    "el": "Greek",
    "gu": "Gujarati",
    "he": "Hebrew",
    "hi": "Hindi",
    "hy": "Armenian",
    "ja": "Japanese",
    "ka": "Georgian",
    "km": "Khmer",
    "kn": "Kannada",
    "ko": "Korean",
    "lt": "Lithuanian",
    "ml": "Malayalam",
    "my": "Burmese",
    "pl": "Polish",
    "ru": "Russian",
    "ta": "Tamil",
    "te": "Telugu",
    "th": "Thai",
    "tr": "Turkish",
    "vi": "Vietnamese",
    "zh": "Chinese",
}
"""CLDR code and English name of the languages of the default task.

Few share a script: many of CLDR's names (Akoose, Basaa) are the same letters wherever these serve,
and belong to a language no more than to its neighbours.
"""

_WANTED = (3, 7)  # the tokens of "both-tokens"
_KINDS, _TOKENS = 19, 8  # different tokens, and tokens of a text


@dataclass(frozen=True)
class Options(TrainingOptions):
    """What ``attnkit train classify`` takes."""

    output: Path = option("runs/classify", "folder of the run")
    data: Path | None = option(None, "lines of a label, a tab and a text, in place of --task")
    task: str = option(
        "languages",
        "languages: of which of 24 a name of CLDR's is; both-tokens: whether 3 and 7 both occur",
        choices=TASKS,
    )
    held_out: float = option(
        0.1, "share of the texts kept for validation, and again for the test", least=0, most=0.4
    )
    vocab_size: int = option(1000, "subwords", least=Subwords.LEAST)
    max_length: int = option(64, "tokens of a text; longer ones are cut", least=3)
    d_model: int = option(64, "width of the model", least=1)
    num_heads: int = option(4, "attention heads", least=1)
    num_layers: int = option(2, "layers", least=1)
    d_ff: int = option(128, "inner width of the feed-forward networks", least=1)
    dropout: float = option(0.1, "everywhere in the model", least=0, most=1)
    steps: int = option(600, "the most optimizer steps", least=1)
    batch_tokens: int = option(2048, "tokens of a step's batch, padding included", least=1)
    learning_rate: float = option(2e-3, "the highest, at the end of the warm-up", least=0)


@dataclass(frozen=True)
class Labelled:
    """Texts with their labels; those of one key are never parted between training and test."""

    labels: list[str]
    texts: list[str]
    keys: list[str]


def main(options: Options, console: Console) -> int:
    """Train, and print the accuracy on the test texts; the exit status."""
    data = read_data(options)
    names = sorted(set(data.labels))
    with runs.started(options, console) as run:
        parts = texts.parted(data.keys, [1] * len(data.texts), options.seed, options.held_out)
        subwords = run.subwords([data.texts[i] for i in parts.training], options.vocab_size)
        rows = encoded(data.texts, subwords, options.max_length)
        classes = [names.index(label) for label in data.labels]
        training, validation, test = (
            Examples(([rows[i] for i in part], [classes[i] for i in part]), PAD_ID)
            for part in parts
        )
        task = Task(
            training,
            validation,
            logits=lambda model, batch: model(batch[0]),
            targets=lambda batch: batch[1],
            ignore_index=-100,  # no class: there is a target for each text
        )
        model = run.build(lambda: build(options, subwords.vocab_size, len(names)))
        run.train(model, task)
        if run.processes.first:
            (run.model_folder / LABELS_FILE).write_text("\n".join(names) + "\n", encoding="utf-8")
            report(run, model, test, [data.texts[i] for i in parts.test], names)
    return 0


def report(
    run: Run, model: Classifier, test: Examples, written: Sequence[str], names: Sequence[str]
) -> None:
    """Print some mistakes and the accuracy, and draw which class was taken for which."""
    found = predict(model, test, run.options.batch_tokens)
    true = test.columns[1]
    counts = [[0] * len(names) for _ in names]
    for expected, guess in zip(true, found, strict=True):
        counts[expected][guess] += 1
    viz.confusion_matrix(counts, names, run.options.output / "confusion.png")
    wrong = [i for i, guess in enumerate(found) if guess != true[i]]
    for i in wrong[:5]:
        run.say(f"{written[i]}: {names[true[i]]}, taken for {names[found[i]]}")
    right = len(found) - len(wrong)
    run.say(
        f"accuracy {100 * right / len(found):.2f}%  on {len(found)} held-out texts of "
        f"{len(names)} classes"
    )


def read_data(options: Options) -> Labelled:
    """The texts of the file, or of the task.

    Raises:
        UsageError: no such file, a line without a tab, or a single label only.
    """
    if options.data is None:
        if options.task == "both-tokens":
            return both_tokens(options.seed)
        return language_names()
    labels, written = [], []
    for number, line in enumerate(texts.read_lines(options.data, "--data"), start=1):
        label, tab, text = line.partition("\t")
        if not line:
            continue
        if not (tab and label and text.strip()):
            raise UsageError(
                f"--data {options.data}, line {number}: {line[:40]!r}, expected a label, a tab "
                "and a text"
            )
        labels.append(label)
        written.append(text.strip())
    if len(set(labels)) < 2:
        raise UsageError(f"--data {options.data} has the label {labels[0]!r} only, expected two")
    return Labelled(labels, written, written)


def language_names() -> Labelled:
    """What each language of :data:`LANGUAGES` calls the territories and languages of CLDR.

    A name that two of them write alike tells nothing and is left out.  The key is the thing that is
    named: what is tested was seen in training in no language.
    """
    from babel import Locale

    named = defaultdict(set)  # languages by name and thing
    for code in LANGUAGES:
        locale = Locale.parse(code)
        for kind, names in (("territory", locale.territories), ("language", locale.languages)):
            for thing, name in names.items():
                named[name.casefold()].add((code, f"{kind} {thing}", name))
    own = (uses for uses in named.values() if len({code for code, _, _ in uses}) == 1)
    kept = sorted(map(min, own))
    return Labelled(
        [LANGUAGES[code] for code, _, _ in kept],
        [name for _, _, name in kept],
        [thing for _, thing, _ in kept],
    )


def both_tokens(seed: int, count: int = 10000) -> Labelled:
    """Texts of 8 tokens of 19 kinds, half of them with both 3 and 7: yes, and else no.

    No text occurs twice.  To see it the model has to join what stands at two places.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, dict[str, None]] = {"yes": {}, "no": {}}
    while min(map(len, found.values())) < count // 2:
        for row in torch.randint(_KINDS, (count, _TOKENS), generator=generator).tolist():
            label = "yes" if all(token in row for token in _WANTED) else "no"
            if len(found[label]) < count // 2:
                found[label][" ".join(map(str, row))] = None
    written = [text for rows in found.values() for text in rows]
    return Labelled([label for label, rows in found.items() for _ in rows], written, written)


def encoded(written: Sequence[str], subwords: Subwords, max_length: int) -> list[list[int]]:
    """Token rows ``<bos> text <eos>``, the text cut where there is no room for more."""
    return [[BOS_ID, *row[: max_length - 2], EOS_ID] for row in subwords.encode(written)]


def build(options: Options, vocab_size: int, num_classes: int) -> Classifier:
    """An untrained Pre-Norm encoder whose outputs are averaged for the classes."""
    return Classifier(
        TransformerConfig(
            vocab_size=vocab_size,
            d_model=options.d_model,
            num_heads=options.num_heads,
            num_layers=options.num_layers,
            d_ff=options.d_ff,
            dropout=options.dropout,
            max_length=options.max_length,
            norm_first=True,
            num_classes=num_classes,
            pad_id=PAD_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
        )
    )


@torch.no_grad()
def predict(model: Classifier, examples: Examples, batch_tokens: int) -> list[int]:
    """The likeliest class of each example, in their order."""
    device = next(model.parameters()).device
    found = [0] * len(examples)
    for indices in token_batches(examples.lengths, batch_tokens):
        tokens = examples.batch(indices)[0].to(device)
        for i, guess in zip(indices, model(tokens).argmax(-1).tolist(), strict=True):
            found[i] = guess
    return found
