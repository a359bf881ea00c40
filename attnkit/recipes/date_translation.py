"""Train the encoder-decoder to write dates in other languages, and translate with it.

loss = label-smoothed cross entropy of each target token given the source and the tokens before
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from attnkit.models import (
    Seq2SeqConfig,
    Seq2SeqTransformer,
    label_smoothed_cross_entropy,
)
from attnkit.recipes.dates import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    Batch,
    DateSplit,
    DateTokenizer,
    Example,
    bucketed_batches,
    every_language,
    pad_batch,
    sample_examples,
    split_dates,
)

TOKENIZER_FILE = "tokenizer.json"
_LOWEST_RATE = 0.05  # of the highest, at the end of its fall
_POOL = 16  # batches that are drawn and sorted by length at a time


@dataclass(frozen=True)
class Recipe:
    """Everything that decides how a training run goes, apart from the machine.

    Args:
        seed: of the split of the dates, the initial values and the order of the batches.
        d_model, num_heads, num_layers, d_ff: sizes of the model; encoder and decoder are as deep.
        vocab_size: subwords of all languages together.
        batch_size: pairs of a step.
        learning_rate: the highest, at the end of the warm-up.
        warmup: steps of linear rise to it; it is held until the model is good enough.
        good_enough: share of the validation translations right at which the rate begins to fall.
        decay: steps of linear fall to a twentieth, at whose end ``goal`` decides.
        max_steps: at which training gives up.
        smoothing: of the labels.
        clip: the largest norm of the gradient.
        max_length: of a source or target, in tokens.
        validate_every: steps between two validations.
        validation_dates, test_dates: held out in every language.
        glance: of the validation dates, those that all validations but a deciding one look at.
        goal: share of the validation dates right in every language at which training ends; if
            it is missed at the end of a fall, the rate rises again for another.
    """

    seed: int = 0
    d_model: int = 128
    num_heads: int = 4
    num_layers: int = 2
    d_ff: int = 256
    vocab_size: int = 1200
    batch_size: int = 48
    learning_rate: float = 3e-3
    warmup: int = 60
    good_enough: float = 0.95
    decay: int = 150
    max_steps: int = 1000
    smoothing: float = 0.1
    clip: float = 1.0
    max_length: int = 40
    validate_every: int = 25
    validation_dates: int = 200
    glance: int = 40
    test_dates: int = 1000
    goal: float = 1.0

    def loss_floor(self, vocab_size: int) -> float:
        """The least loss with ``smoothing``: the entropy of the smoothed labels, nats per token."""
        rest = self.smoothing / vocab_size
        top = 1.0 - self.smoothing + rest
        entropy = -top * math.log(top)
        return entropy - (vocab_size - 1) * rest * math.log(rest) if rest else entropy


@dataclass(frozen=True)
class Task:
    """The dates in three parts, and the subwords learnt from texts of the first."""

    split: DateSplit
    tokenizer: DateTokenizer

    @classmethod
    def prepare(cls, recipe: Recipe, texts: int = 8000) -> Task:
        """Split the dates and learn the subwords from ``texts`` training pairs."""
        split = split_dates(recipe.seed, validation=recipe.validation_dates, test=recipe.test_dates)
        some = sample_examples(split.train, texts, random.Random(recipe.seed))
        written = (text for example in some for text in (example.source, example.target))
        return cls(split, DateTokenizer.train(written, recipe.vocab_size))


class Validation(NamedTuple):
    """Shares of the validation that were right after a step: of its dates, of its translations."""

    step: int
    dates: float
    translations: float


@dataclass
class History:
    """What happened in training, step by step."""

    losses: list[float] = field(default_factory=list)  # of each step, nats per token
    learning_rates: list[float] = field(default_factory=list)  # of each step
    validations: list[Validation] = field(default_factory=list)
    tokens: int = 0  # source and target tokens seen, without padding
    seconds: float = 0.0  # of training, validations included

    @property
    def steps(self) -> int:
        """Steps done."""
        return len(self.losses)


class Mistake(NamedTuple):
    """A translation that is not exactly the right text."""

    example: Example
    found: str


@dataclass(frozen=True)
class Score:
    """How many of ``dates`` were translated exactly: into every language, not a letter wrong."""

    dates: int
    right: int
    translations: int
    mistakes: tuple[Mistake, ...]

    @property
    def share(self) -> float:
        """Dates right in every language, as a part of all; 0 when there were none."""
        return self.right / self.dates if self.dates else 0.0

    @property
    def translations_share(self) -> float:
        """The same of single translations."""
        return 1.0 - len(self.mistakes) / self.translations if self.translations else 0.0


def build_model(recipe: Recipe, vocab_size: int) -> Seq2SeqTransformer:
    """An untrained model with one embedding for source, target and output; Pre-Norm."""
    return Seq2SeqTransformer(
        Seq2SeqConfig(
            src_vocab=vocab_size,
            tgt_vocab=vocab_size,
            d_model=recipe.d_model,
            num_heads=recipe.num_heads,
            num_encoder_layers=recipe.num_layers,
            num_decoder_layers=recipe.num_layers,
            d_ff=recipe.d_ff,
            dropout=0.0,  # no pair is seen twice, so there is nothing to learn by heart
            max_length=recipe.max_length,
            norm_first=True,
            tie_embeddings=True,
            share_embeddings=True,
            pad_id=PAD_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
        )
    )


class Translator:
    """A model with its subwords: text in, text out."""

    def __init__(self, model: Seq2SeqTransformer, tokenizer: DateTokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def sources(self, examples: Sequence[Example]) -> Tensor:
        """The source tokens [B, S] of ``examples`` on the model's device."""
        return pad_batch(self.tokenizer.sources(examples)).to(self.device)

    def translate(
        self, examples: Sequence[Example], *, num_beams: int = 1, batch_size: int = 1024
    ) -> list[str]:
        """The model's text for each of ``examples`` (their targets are not looked at)."""
        texts: list[str] = []
        for start in range(0, len(examples), batch_size):
            source = self.sources(examples[start : start + batch_size])
            found = self.model.generate(source, num_beams=num_beams)
            texts += map(self.tokenizer.text, found.tokens.tolist())
        return texts

    def score(self, examples: Sequence[Example]) -> Score:
        """Translate ``examples`` greedily and compare with their targets."""
        # by length, so that a batch's steps are few where its targets are short
        ordered = sorted(examples, key=lambda example: (example.language, example.day))
        found = self.translate(ordered)
        mistakes = tuple(
            Mistake(example, text)
            for example, text in zip(ordered, found, strict=True)
            if text != example.target
        )
        days = {example.day for example in ordered}
        wrong = {mistake.example.day for mistake in mistakes}
        return Score(len(days), len(days) - len(wrong), len(ordered), mistakes)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the model (safetensors and its config) and the tokenizer."""
        self.model.save_pretrained(directory)
        self.tokenizer.save(Path(directory) / TOKENIZER_FILE)

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, device: torch.device | str = "cpu"
    ) -> Translator:
        """Read what :meth:`save_pretrained` wrote."""
        model = Seq2SeqTransformer.from_pretrained(directory, device)
        return cls(model, DateTokenizer.load(Path(directory) / TOKENIZER_FILE))


class Schedule:
    """Learning rates that follow the validation: rise, hold until good enough, fall.

    How soon a model gets there differs from seed to seed, so no number of steps is planned.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.turn: int | None = None  # the step after which the rate falls

    def rate(self, step: int) -> float:
        """The rate of a step, counted from 1."""
        rate = self.recipe.learning_rate * min(1.0, step / self.recipe.warmup)
        if self.turn is None:
            return rate
        return rate * max(_LOWEST_RATE, 1.0 - (step - self.turn) / self.recipe.decay)

    def has_fallen(self, step: int) -> bool:
        """Whether the validation after ``step`` decides if training ends."""
        return self.turn is not None and step >= self.turn + self.recipe.decay

    def finished(self, step: int, score: Score) -> bool:
        """Whether training ends with what the validation after ``step`` says."""
        if self.turn is None:
            if step >= self.recipe.warmup and score.translations_share >= self.recipe.good_enough:
                self.turn = step
            return False
        if not self.has_fallen(step):  # the rate is too high to judge
            return False
        if score.share < self.recipe.goal:
            self.turn = None
            return False
        return True


def train(
    task: Task,
    recipe: Recipe,
    device: torch.device | str = "cpu",
    *,
    on_step: Callable[[History], object] | None = None,
    on_validation: Callable[[History, Score], object] | None = None,
) -> tuple[Translator, History]:
    """Train a new model until the validation dates reach the goal, or ``max_steps``.

    Args:
        task: dates and subwords.
        recipe: sizes, rates and the goal.
        device: where to train.
        on_step: called after each step.
        on_validation: called after each validation.
    """
    torch.manual_seed(recipe.seed)
    model = build_model(recipe, task.tokenizer.vocab_size).to(device).train()
    translator = Translator(model, task.tokenizer)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=recipe.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=0.01,
        fused=True,  # one pass over all parameters: a tenth of a step's time on a CPU
    )
    schedule = Schedule(recipe)
    validation = every_language(task.split.validation)
    glance = every_language(task.split.validation[: recipe.glance])
    history = History()
    start = time.perf_counter()
    for batch in _batches(task, recipe):
        source, target = batch.source.to(device), batch.target.to(device)
        rate = schedule.rate(history.steps + 1)
        history.learning_rates.append(rate)
        optimizer.param_groups[0]["lr"] = rate
        logits = model(source, target[:, :-1])
        loss = label_smoothed_cross_entropy(logits, target[:, 1:], recipe.smoothing, PAD_ID)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        history.losses.append(float(loss.detach()))
        history.tokens += int((batch.source != PAD_ID).sum() + (batch.target != PAD_ID).sum())
        history.seconds = time.perf_counter() - start
        if on_step is not None:
            on_step(history)
        if history.steps % recipe.validate_every == 0 or history.steps == recipe.max_steps:
            deciding = schedule.has_fallen(history.steps) or history.steps >= recipe.max_steps
            score = translator.score(validation if deciding else glance)
            history.validations.append(
                Validation(history.steps, score.share, score.translations_share)
            )
            history.seconds = time.perf_counter() - start
            if on_validation is not None:
                on_validation(history, score)
            if schedule.finished(history.steps, score) or history.steps >= recipe.max_steps:
                break
    model.eval()
    return translator, history


def _batches(task: Task, recipe: Recipe) -> Iterator[Batch]:
    """Training batches without end."""
    rng = random.Random(recipe.seed)
    while True:
        drawn = sample_examples(task.split.train, _POOL * recipe.batch_size, rng)
        yield from bucketed_batches(drawn, task.tokenizer, recipe.batch_size, rng)


class Speed(NamedTuple):
    """How fast a way of generating was."""

    num_beams: int
    use_cache: bool
    tokens: int  # generated, ends included
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the hypotheses that were returned, per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


class GenerationCheck(NamedTuple):
    """Speeds of the ways to generate, and how many rows differed with and without the cache."""

    speeds: tuple[Speed, ...]
    rows: int
    different: int


def generation_speeds(
    translator: Translator, examples: Sequence[Example], *, num_beams: int = 4, rounds: int = 3
) -> GenerationCheck:
    """Time greedy and beam search, with and without the cache, in turn; the best round counts."""
    source = translator.sources(examples)
    ways = [(beams, cached) for beams in (1, num_beams) for cached in (True, False)]
    best = dict.fromkeys(ways, math.inf)
    found = {}
    for _ in range(rounds):
        for beams, cached in ways:
            start = time.perf_counter()
            found[beams, cached] = translator.model.generate(
                source, num_beams=beams, use_cache=cached
            )
            if source.is_cuda:
                torch.cuda.synchronize(source.device)
            best[beams, cached] = min(best[beams, cached], time.perf_counter() - start)
    different = 0
    for beams in (1, num_beams):
        pair = [found[beams, cached].tokens.tolist() for cached in (True, False)]
        texts = [[translator.tokenizer.trimmed(row) for row in rows] for rows in pair]
        different += sum(a != b for a, b in zip(*texts, strict=True))
    speeds = tuple(Speed(*way, int(found[way].lengths.sum()), best[way]) for way in ways)
    return GenerationCheck(speeds, 2 * len(examples), different)


class Alignment(NamedTuple):
    """Where the decoder looked while it wrote: a layer's weights [T, S], averaged over heads."""

    example: Example
    rows: list[str]  # tokens written, the end included
    columns: list[str]  # source tokens
    weights: Tensor


def alignments(
    translator: Translator, examples: Sequence[Example], layer: int = -1
) -> list[Alignment]:
    """Cross-attention of greedy translations: row t shows where the model looked for token t."""
    tokenizer, model = translator.tokenizer, translator.model
    source = translator.sources(examples)
    found = model.generate(source)
    begin = source.new_full((len(examples), 1), BOS_ID)
    fed = torch.cat([begin, found.tokens[:, :-1]], dim=1)  # position t holds what precedes token t
    weights = model.attention_maps(source, fed, layer, kind="cross").mean(1).cpu()  # [B, T, S]
    every = []
    for i, example in enumerate(examples):
        written = found.tokens[i, : int(found.lengths[i])].tolist()
        read = source[i, : int((source[i] != PAD_ID).sum())].tolist()
        rows, columns = tokenizer.labels(written), tokenizer.labels(read)
        every.append(Alignment(example, rows, columns, weights[i, : len(rows), : len(columns)]))
    return every
