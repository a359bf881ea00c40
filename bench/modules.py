"""The modules of attnkit.nn beside torch.nn's: a training step, and inference without gradients.

    python bench/modules.py [--rounds N] [--threads N] [--clock cpu]    # cpu: on a busy machine

Outputs are compared before anything is timed; then both sides take turns in interleaved rounds.
Most of an encoder layer's time is spent in its linear layers, which are torch's on both sides.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import attnkit.nn
from attnkit.benchmark import CLOCKS, Candidate, compare

WIDTH, HEADS, BATCH, LENGTH = 512, 8, 4, 512


def attention(library: object) -> nn.Module:
    return library.MultiheadAttention(WIDTH, HEADS, batch_first=True)  # type: ignore[attr-defined]


def encoder_layer(library: object) -> nn.Module:
    return library.TransformerEncoderLayer(  # type: ignore[attr-defined]
        WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True
    )


def call(module: nn.Module, x: Tensor, mask: str) -> Tensor:
    lengths = torch.tensor([LENGTH, LENGTH // 2, LENGTH // 3, LENGTH // 4])
    padding = torch.arange(LENGTH) >= lengths[:, None] if mask == "padded" else None
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) if mask == "causal" else None
    hint = causal is not None
    if isinstance(module, nn.MultiheadAttention):
        masks = {"attn_mask": causal, "key_padding_mask": padding, "is_causal": hint}
        return module(x, x, x, need_weights=False, **masks)[0]
    return module(x, src_mask=causal, src_key_padding_mask=padding, is_causal=hint)


def step(module: nn.Module, x: Tensor, mask: str) -> Tensor:
    module.zero_grad()
    out = call(module.train(), x, mask)
    out.sum().backward()
    return out.detach()


@torch.no_grad()
def inference(module: nn.Module, x: Tensor, mask: str) -> Tensor:
    return call(module.eval(), x, mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    print(f"{BATCH} x {LENGTH} x {WIDTH}, {HEADS} heads, {torch.get_num_threads()} threads")
    for make in (attention, encoder_layer):
        ours, theirs = make(attnkit.nn), make(nn)
        ours.load_state_dict(theirs.state_dict())
        for run in (step, inference):
            for mask in ("full", "causal", "padded"):
                _report(
                    f"{make.__name__} {run.__name__} {mask}", run, (ours, theirs), x, mask, options
                )


def _report(
    name: str,
    run: Callable[[nn.Module, Tensor, str], Tensor],
    modules: tuple[nn.Module, nn.Module],
    x: Tensor,
    mask: str,
    options: argparse.Namespace,
) -> None:
    found, expected = (run(module, x, mask)[0] for module in modules)  # sequence 0 has no padding
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    timed = compare(
        [
            Candidate(side, partial(run, module, x, mask))
            for side, module in zip(("attnkit", "torch"), modules, strict=True)
        ],
        rounds=options.rounds,
        clock=CLOCKS[options.clock],
    )
    times = ", ".join(f"{side} {s.median * 1e3:.1f} ms" for side, s in timed.samples.items())
    print(f"{name:32s} {times}, {timed.ratio('attnkit', 'torch').median:.2f} times torch's speed")


if __name__ == "__main__":
    main()
