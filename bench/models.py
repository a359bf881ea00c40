"""The speed of whole models beside the same models of torch.nn, with the same weights.

    python bench/models.py [--layers N] [--batch-tokens N] [--lengths N ...] [--rounds N]
        [--dtypes fp32 bf16] [--only encoder lm writing translating] [--threads N] [--clock cpu]
        [--save FILE]

encoder       attnkit.nn.TransformerEncoder and torch.nn's
lm            attnkit.models.CausalLM and torch.nn.TransformerEncoder between embedding and loss
writing       tokens from CausalLM, and from torch.nn's modules with a cache that is concatenated
translating   tokens from Seq2SeqTransformer, and from torch.nn.Transformer in the same way

d_model is 768, with 12 heads.  What both sides give is compared in float32 before anything is
timed; then they take turns in interleaved rounds.  Most of the time is spent in linear layers,
which are torch's on both sides.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnkit.nn
from attnkit.benchmark import (
    CLOCKS,
    Candidate,
    Ratio,
    compare,
    describe_machine,
    describe_versions,
    headline,
)
from attnkit.benchmark.torch_models import TorchLM, TorchTranslator, torch_layer
from attnkit.models import CausalLM, Seq2SeqConfig, Seq2SeqTransformer, TransformerConfig

WIDTH, HEADS, VOCABULARY = 768, 12, 8192
PROMPT, WRITTEN = 64, 64  # tokens of a generation
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# of the largest output: float32 on both sides; then bf16, whose 8 bits are rounded in every layer
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


class Contest(NamedTuple):
    """Two ways to the same, and how many tokens each goes through."""

    name: str
    ours: Callable[[], object]
    theirs: Callable[[], object]
    tokens: int


# ------------------------------------------------------------- what is timed


def step(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> None:
    model.zero_grad()
    loss(model(x)).backward()


@torch.no_grad()
def inference(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def both(name: str, ours: nn.Module, theirs: nn.Module, x: Tensor, loss: Callable) -> Iterator:
    """A training step and inference of two models that are the same function."""
    tokens = x.shape[0] * x.shape[1]
    check(ours, theirs, x[:1], loss)
    sides = ours.train(), theirs.train()
    yield Contest(f"{name}: training step", *(partial(step, m, x, loss) for m in sides), tokens)
    sides = ours.eval(), theirs.eval()
    yield Contest(f"{name}: forward", *(partial(inference, m, x) for m in sides), tokens)


def check(ours: nn.Module, theirs: nn.Module, x: Tensor, loss: Callable) -> None:
    """Both give the same output, and the same gradient for the weights of the first layer."""
    found = []
    for model in (ours.train(), theirs.train()):
        out = model(x)
        loss(out).backward()
        parts = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
        found.append((inference(model.eval(), x), parts[0].weight.grad))
    for got, expected in zip(*found, strict=True):
        error = (got - expected).abs().max() / expected.abs().max()
        if not error <= TOLERANCE[got.dtype]:
            raise RuntimeError(f"{type(ours).__name__} is off by {error:.1e}: not timed")


def check_written(twin: nn.Module, inputs: tuple[Tensor, ...], written: Tensor) -> None:
    """Each token is the likeliest after those before it, by a run of ``twin`` without a cache."""
    with torch.no_grad():
        logits = twin(*inputs)[:, -written.shape[1] :]
    chosen = logits.gather(-1, written[..., None])[..., 0]
    error = (logits.amax(-1) - chosen).max() / logits.abs().max()
    if not error <= TOLERANCE[logits.dtype]:
        raise RuntimeError(f"a token's logit is {error:.1e} below the largest: not timed")


def encoders(options: argparse.Namespace, dtype: torch.dtype) -> Iterator[Contest]:
    config = lm_config(options)
    ours, theirs = (
        library.TransformerEncoder(
            torch_layer(library.TransformerEncoderLayer, config),
            options.layers,
            nn.LayerNorm(WIDTH),
            enable_nested_tensor=False,
        ).to(dtype)
        for library in (attnkit.nn, nn)
    )
    ours.load_state_dict(theirs.state_dict())
    for length in options.lengths:
        x = torch.randn(max(1, options.batch_tokens // length), length, WIDTH, dtype=dtype)
        direction = torch.randn(length, WIDTH, dtype=dtype)

        def loss(out: Tensor, direction: Tensor = direction) -> Tensor:
            return (out * direction).sum()

        yield from both(f"encoder, L {length}", ours, theirs, x, loss)


def language_models(options: argparse.Namespace, dtype: torch.dtype) -> Iterator[Contest]:
    ours = CausalLM(lm_config(options)).to(dtype)
    theirs = TorchLM(ours).to(dtype)
    for length in options.lengths:
        shape = max(1, options.batch_tokens // length), length
        tokens = torch.randint(VOCABULARY, shape)

        def loss(out: Tensor, tokens: Tensor = tokens) -> Tensor:
            return F.cross_entropy(out.flatten(0, 1).float(), tokens[: len(out)].flatten())

        yield from both(f"lm, L {length}", ours, theirs, tokens, loss)


def writing(options: argparse.Namespace, dtype: torch.dtype) -> Iterator[Contest]:
    ours = CausalLM(lm_config(options)).to(dtype).eval()
    theirs = TorchLM(ours).to(dtype).eval()
    for batch in options.batches:
        prompt = torch.randint(VOCABULARY, (batch, PROMPT))
        sides = (
            lambda prompt=prompt: ours.generate(prompt, WRITTEN).tokens,
            partial(theirs.generate, prompt, WRITTEN),
        )
        for side in sides:
            written = side()
            check_written(theirs, (torch.cat((prompt, written[:, :-1]), 1),), written)
        yield Contest(f"writing, batch {batch}", *sides, batch * WRITTEN)


def translating(options: argparse.Namespace, dtype: torch.dtype) -> Iterator[Contest]:
    config = Seq2SeqConfig(
        VOCABULARY,
        VOCABULARY,
        WIDTH,
        HEADS,
        options.layers,
        options.layers,
        4 * WIDTH,
        **common(PROMPT + WRITTEN),
    )
    ours = Seq2SeqTransformer(config).to(dtype).eval()
    theirs = TorchTranslator(ours).to(dtype).eval()
    for batch in options.batches:
        source = torch.randint(3, VOCABULARY, (batch, PROMPT))
        plain = {"eos_id": None, "pad_id": None}  # neither ends a row, and none is withheld
        sides = (
            lambda source=source, plain=plain: ours.generate(source, WRITTEN, **plain).tokens,
            partial(theirs.generate, source, WRITTEN),
        )
        for side in sides:
            written = side()
            target = F.pad(written[:, :-1], (1, 0), value=1)
            check_written(theirs, (source, target), written)
        yield Contest(f"translating, batch {batch}", *sides, batch * WRITTEN)


def lm_config(options: argparse.Namespace) -> TransformerConfig:
    special = {"pad_id": None, "bos_id": None, "eos_id": None}
    longest = max(*options.lengths, PROMPT + WRITTEN)
    return TransformerConfig(
        VOCABULARY, WIDTH, HEADS, options.layers, 4 * WIDTH, **special, **common(longest)
    )


def common(longest: int) -> dict[str, object]:
    return {"dropout": 0.0, "activation": "gelu", "norm_first": True, "max_length": longest}


SUBJECTS = {
    "encoder": encoders,
    "lm": language_models,
    "writing": writing,
    "translating": translating,
}


# ------------------------------------------------------------- the table


def line(contest: Contest, dtype: str, options: argparse.Namespace) -> str:
    timed = compare(
        [Candidate("attnkit", contest.ours), Candidate("torch.nn", contest.theirs)],
        rounds=options.rounds,
        clock=CLOCKS[options.clock],
    )
    ours, theirs = (contest.tokens / s.median for s in timed.samples.values())
    ratio: Ratio = timed.ratio("attnkit", "torch.nn")
    cells = (contest.name, dtype, f"{ours:.0f}", f"{theirs:.0f}", f"{ratio.median:.2f}")
    return f"| {' | '.join(cells)} | {ratio.interval()[0]:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch-tokens", type=int, default=1024, help="of a training step")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16], help="of a generation")
    parser.add_argument("--rounds", type=int, default=7, help="at least 6 (default: 7)")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--only", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the table here")
    options = parser.parse_args()
    if options.rounds < 6:
        parser.error(f"argument --rounds: {options.rounds}, expected 6 or more for the bound")
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    lines = [
        headline(describe_machine(), describe_versions()),
        f"{options.layers} layers, d_model {WIDTH}, {HEADS} heads; {options.batch_tokens} tokens "
        f"in a training step; {WRITTEN} tokens written after {PROMPT}; {options.rounds} rounds, "
        f"{options.clock} clock",
        "",
        "| what | dtype | attnkit, tokens/s | torch.nn, tokens/s | times its speed "
        "| at least (95%) |",
        "|---|---|--:|--:|--:|--:|",
    ]
    print("\n".join(lines), flush=True)
    for subject in options.only:
        for dtype in options.dtypes:
            for contest in SUBJECTS[subject](options, DTYPES[dtype]):
                lines.append(line(contest, dtype, options))
                print(lines[-1], flush=True)
    if options.save:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
