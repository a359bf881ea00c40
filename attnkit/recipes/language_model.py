"""``attnkit train lm``: a decoder-only language model of any text, beside a 5-gram model.

perplexity = exp(mean of -log p(token | the tokens before it in the document)), on held-out text
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attnkit.models import CausalLM, TransformerConfig, label_smoothed_cross_entropy
from attnkit.recipes import runs, texts
from attnkit.recipes.batches import Examples, token_batches
from attnkit.recipes.ngram import NGram
from attnkit.recipes.options import TrainingOptions, option
from attnkit.recipes.runs import Run
from attnkit.recipes.subwords import BOS_ID, EOS_ID, PAD_ID, Subwords
from attnkit.recipes.training import Task

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "a language model; by default, of the English text in Python's own documentation"
MODULES = ("tokenizers", "rich", "matplotlib")
_DOCUMENTS = 100  # in which a single text is cut


@dataclass(frozen=True)
class Options(TrainingOptions):
    """What ``attnkit train lm`` takes."""

    output: Path = option("runs/lm", "folder of the run")
    text: Path | None = option(None, "text to learn from, a file or a folder of .txt files")
    held_out: float = option(
        0.1, "share of the text kept for validation, and again for the test", least=0, most=0.4
    )
    vocab_size: int = option(512, "subwords", least=Subwords.LEAST)
    context: int = option(256, "tokens that the model looks back at most", least=2)
    d_model: int = option(128, "width of the model", least=1)
    num_heads: int = option(4, "attention heads", least=1)
    num_layers: int = option(3, "layers", least=1)
    d_ff: int = option(512, "inner width of the feed-forward networks", least=1)
    dropout: float = option(0.15, "everywhere in the model", least=0, most=1)
    samples: int = option(2, "texts that the trained model writes at the end", least=0)
    steps: int = option(1400, "the most optimizer steps", least=1)
    batch_tokens: int = option(2048, "tokens of a step's batch, padding included", least=1)
    learning_rate: float = option(4e-3, "the highest, at the end of the warm-up", least=0)
    weight_decay: float = option(0.1, "of AdamW, on matrices only", least=0)


def main(options: Options, console: Console) -> int:
    """Train, and print the perplexity on the test documents beside a 5-gram's; the exit status."""
    documents = read_documents(options)
    with runs.started(options, console) as run:
        sizes = [len(document) for document in documents]
        parts = texts.parted(range(len(documents)), sizes, options.seed, options.held_out)
        written = [[documents[i] for i in part] for part in parts]
        subwords = run.subwords(written[0], options.vocab_size)
        training, validation, test = (
            [[BOS_ID, *row, EOS_ID] for row in subwords.encode(part)] for part in written
        )
        context = options.context
        task = Task(
            # each token is seen at two places of a window
            windows(training, context, context // 2, overlap_counts=True),
            windows(validation, context, context // 2),
            logits=lambda model, batch: model(batch[0]),
            targets=lambda batch: batch[1],
            ignore_index=PAD_ID,
        )
        model = run.build(lambda: build(options, subwords.vocab_size))
        run.train(model, task)
        if run.processes.first:
            show_samples(run, model, subwords, options)
            own = perplexity(model, windows(test, context, context // 2), options.batch_tokens)
            counted = NGram(training, subwords.vocab_size).perplexity(test)
            run.say(
                f"perplexity {own:.2f}  5-gram {counted:.2f}  on {sum(map(len, test))} held-out "
                f"subwords of {len(test)} documents"
            )
    return 0


def read_documents(options: Options) -> list[str]:
    """The texts of the file or folder, or of Python's documentation; no paragraph occurs twice.

    A file is cut into runs of paragraphs of about equal length: held-out text is then beside text
    to train on, not between its lines.

    Raises:
        UsageError: a path of nothing, or no text.
    """
    path = options.text
    if path is None:
        from pydoc_data.topics import topics

        # the shortest first: the long ones repeat whole short ones
        return without_repeats(sorted(topics.values(), key=lambda text: (len(text), text)))
    if path.is_dir():
        files = sorted(path.rglob("*.txt"))
        return without_repeats(texts.read_text(file, "--text") for file in files)
    (text,) = without_repeats([texts.read_text(path, "--text")])
    documents, size = [""], len(text) / _DOCUMENTS
    for line in text.splitlines(keepends=True):
        if len(documents[-1]) >= size:
            documents.append("")
        documents[-1] += line
    return documents


def without_repeats(documents: Iterable[str]) -> list[str]:
    """``documents`` without paragraphs that stand before, in the same one or another."""
    seen: set[str] = set()
    kept = []
    for document in documents:
        own = []
        for paragraph in document.split("\n\n"):
            words = " ".join(paragraph.split())
            if words and words not in seen:
                seen.add(words)
                own.append(paragraph.strip("\n"))
        if own:
            kept.append("\n\n".join(own) + "\n")
    return kept


def windows(
    documents: Iterable[Sequence[int]],
    context: int,
    stride: int,
    *,
    overlap_counts: bool = False,
) -> Examples:
    """Inputs and targets, one token on, of windows of ``context`` tokens each ``stride`` apart.

    Each token but a document's first is the target of exactly one window, the first that has it,
    and padding in the next ones, unless ``overlap_counts``.
    """
    inputs, targets = [], []
    for document in documents:
        counted = 1  # tokens that were targets; the first never is
        for start in range(0, len(document) - 1, stride):
            end = min(start + context, len(document) - 1)
            if end < counted:
                break
            known = 0 if overlap_counts else counted - start - 1
            inputs.append(list(document[start:end]))
            targets.append([PAD_ID] * known + list(document[start + 1 + known : end + 1]))
            counted = end + 1
    return Examples((inputs, targets), PAD_ID)


def build(options: Options, vocab_size: int) -> CausalLM:
    """An untrained Pre-Norm decoder with rotary positions and tied embeddings."""
    return CausalLM(
        TransformerConfig(
            vocab_size=vocab_size,
            d_model=options.d_model,
            num_heads=options.num_heads,
            num_layers=options.num_layers,
            d_ff=options.d_ff,
            dropout=options.dropout,
            max_length=options.context,
            positions="rope",
            norm_first=True,
            activation="gelu",
            tie_embeddings=True,
            pad_id=PAD_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
        )
    )


@torch.no_grad()
def perplexity(model: nn.Module, examples: Examples, batch_tokens: int) -> float:
    """exp of the mean loss over all targets of ``examples`` (:func:`windows`)."""
    device = next(model.parameters()).device
    total, count = 0.0, 0
    for indices in token_batches(examples.lengths, batch_tokens):
        tokens, targets = (column.to(device) for column in examples.batch(indices))
        logits: Tensor = model(tokens)
        total += float(label_smoothed_cross_entropy(logits, targets, 0.0, PAD_ID, reduction="sum"))
        count += int((targets != PAD_ID).sum())
    return math.exp(total / count)


def show_samples(run: Run, model: CausalLM, subwords: Subwords, options: Options) -> None:
    """Print what the model writes when it is given nothing but a beginning."""
    device = next(model.parameters()).device
    prompt = torch.tensor([[BOS_ID]], device=device)
    for number in range(options.samples):
        found = model.generate(
            prompt,
            max_length=min(120, options.context - 1),
            sample=True,
            temperature=0.8,
            top_p=0.95,
            seed=options.seed + number,
        )
        run.say(f"--- sample {number + 1}\n{subwords.decode(found.tokens[0].tolist())}")
