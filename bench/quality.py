"""Do models of attnkit learn as well as the same models of torch.nn?

    python bench/quality.py lm [options of `attnkit train lm`]
    python bench/quality.py translate --source a.txt --target b.txt [options of its recipe]

Both begin with the same weights and see the same batches for as many steps, through the engine of
the recipes; what differs is whose attention and layers they are made of, and the dropout's draws.
lm: the recipe's model turns positions, which torch.nn cannot; a third one, with sines as torch.nn's
model has them, is trained too.  The table is in Markdown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch_models import TorchLM, TorchTranslator

from attnkit.benchmark import describe_machine, describe_versions, headline
from attnkit.models import CausalLM, TransformerConfig
from attnkit.models.generation import GenerationOptions, generate
from attnkit.recipes import language_model, texts, translate
from attnkit.recipes.batches import pad_batch
from attnkit.recipes.options import TrainingOptions
from attnkit.recipes.subwords import BOS_ID, EOS_ID, PAD_ID, Subwords
from attnkit.recipes.training import Task, train

Score = Callable[[nn.Module], dict[str, float]]


def language_models(options: language_model.Options) -> None:
    documents = language_model.read_documents(options)
    sizes = [len(document) for document in documents]
    parts = texts.parted(range(len(documents)), sizes, options.seed, options.held_out)
    written = [[documents[i] for i in part] for part in parts]
    subwords = Subwords.train(written[0], options.vocab_size)
    rows = [[[BOS_ID, *row, EOS_ID] for row in subwords.encode(part)] for part in written]
    context = options.context
    task = Task(
        language_model.windows(rows[0], context, context // 2, overlap_counts=True),
        language_model.windows(rows[1], context, context // 2),
        logits=lambda model, batch: model(batch[0]),
        targets=lambda batch: batch[1],
        ignore_index=PAD_ID,
    )
    test = language_model.windows(rows[2], context, context // 2)

    def sines() -> CausalLM:
        fields = vars(language_model.build(options, subwords.vocab_size).config)
        return CausalLM(TransformerConfig(**{**fields, "positions": "sinusoidal"}))

    models = {
        "torch.nn, sines": lambda: TorchLM(sines()),
        "attnkit, sines": sines,
        "attnkit, the recipe's": lambda: language_model.build(options, subwords.vocab_size),
    }
    contest(
        models,
        task,
        options,
        lambda model: {"perplexity": language_model.perplexity(model, test, options.batch_tokens)},
    )


def translators(options: translate.Options) -> None:
    from sacrebleu.metrics import BLEU, CHRF

    pairs = translate.read_pairs(options)
    sources = [source for source, _ in pairs]
    parts = texts.parted(sources, [1] * len(pairs), options.seed, options.held_out)
    subwords = Subwords.train((t for i in parts.training for t in pairs[i]), options.vocab_size)
    training, validation, test = ([pairs[i] for i in part] for part in parts)
    task = Task(
        translate.encoded(training, subwords, options.max_length),
        translate.encoded(validation, subwords, options.max_length),
        logits=lambda model, batch: model(batch[0], batch[1][:, :-1]),
        targets=lambda batch: batch[1][:, 1:],
        ignore_index=PAD_ID,
    )
    print(f"{len(pairs)} pairs, {len(test)} of them held out", flush=True)

    def score(model: nn.Module) -> dict[str, float]:
        found = translated(model, subwords, [s for s, _ in test], options)
        references = [[target for _, target in test]]
        return {
            "chrF": CHRF().corpus_score(found, references).score,
            "BLEU": BLEU().corpus_score(found, references).score,
        }

    models = {
        "torch.nn": lambda: TorchTranslator(translate.build(options, subwords.vocab_size)),
        "attnkit": lambda: translate.build(options, subwords.vocab_size),
    }
    contest(models, task, options, score)


class Uncached:
    """A session over either kind of translator: the whole prefix at each step."""

    def __init__(self, model: nn.Module, source: Tensor, beams: int) -> None:
        self.model, self.beams = model, beams
        self.source = source.repeat_interleave(beams, 0)
        self.prefix: Tensor | None = None

    def extend(self, tokens: Tensor) -> Tensor:
        self.prefix = tokens if self.prefix is None else torch.cat((self.prefix, tokens), 1)
        return self.model(self.source[:: self._step()], self.prefix)[:, -1]

    def _step(self) -> int:
        """The prompt comes once for all beams of a source."""
        return 1 if len(self.prefix) == len(self.source) else self.beams

    def reorder(self, rows: Tensor) -> None:
        self.prefix = self.prefix[rows]


@torch.no_grad()
def translated(
    model: nn.Module, subwords: Subwords, sources: Sequence[str], options: translate.Options
) -> list[str]:
    """By the same search for both kinds of model."""
    limit = options.max_length - 1
    rows = [[*row[:limit], EOS_ID] for row in subwords.encode(sources)]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    chosen = GenerationOptions(limit, num_beams=options.num_beams, eos_id=EOS_ID, pad_id=PAD_ID)
    found: dict[int, str] = {}
    for start in range(0, len(order), 128):
        some = order[start : start + 128]
        source = pad_batch([rows[i] for i in some], PAD_ID)
        session = Uncached(model, source, options.num_beams)
        tokens = generate(session, source.new_full((len(some), 1), BOS_ID), chosen).tokens
        found.update(zip(some, map(subwords.decode, tokens.tolist()), strict=True))
    return [found[i] for i in range(len(rows))]


def contest(
    models: dict[str, Callable[[], nn.Module]], task: Task, options: TrainingOptions, score: Score
) -> None:
    for number, (name, make) in enumerate(models.items()):
        torch.manual_seed(options.seed)
        model = make()
        history = train(model, task, options)
        assert history.best is not None
        cells = {
            "steps": history.steps,
            "validation loss": f"{history.best.loss:.4f}",
            **{key: f"{value:.2f}" for key, value in score(model.eval()).items()},
            "training, s": f"{history.seconds:.0f}",
        }
        if number == 0:
            print(headline(describe_machine(), describe_versions()), "\n")
            print(f"| model | {' | '.join(cells)} |\n|---|{'--:|' * len(cells)}")
        print(f"| {name} | {' | '.join(map(str, cells.values()))} |", flush=True)


RECIPES = {"lm": (language_model, language_models), "translate": (translate, translators)}


def main() -> None:
    kind = sys.argv[1] if len(sys.argv) > 1 else ""
    if kind not in RECIPES:
        sys.exit(f"expected {' or '.join(RECIPES)} as the first argument\n\n{__doc__}")
    recipe, run = RECIPES[kind]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    recipe.Options.add_arguments(parser)
    run(recipe.Options.from_command_line(vars(parser.parse_args(sys.argv[2:])), None))


if __name__ == "__main__":
    main()
