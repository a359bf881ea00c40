"""One query over a long cache: gigabytes of keys and values read per second.

    python bench/decode.py [--threads N] [--rounds N] [--clock cpu] [--length N]

32 query heads, head dim 128, beside F.scaled_dot_product_attention, with its grouped heads as they
are and folded into the queries (which is faster), and beside the rate at which memory is read, all
in the same rounds.  int8, fp8 and paged caches are attnkit's alone.  What torch finds is compared
with what attnkit finds before anything is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import attnkit
from attnkit.benchmark import (
    CLOCKS,
    PROBE,
    Candidate,
    compare,
    describe_machine,
    describe_versions,
    headline,
    read_probe,
)
from attnkit.cache import PagedKVCache

HEADS, DIM = 32, 128
PAGE = 64
CASES = [  # dtype, batch, key heads, what the cache is
    (torch.float32, 1, 8, "plain"),
    (torch.float32, 1, 32, "plain"),
    (torch.bfloat16, 1, 8, "plain"),
    (torch.bfloat16, 8, 8, "plain"),
    (torch.bfloat16, 8, 8, "paged"),
    (torch.float32, 1, 8, "int8"),
    (torch.float32, 1, 8, "fp8"),
]
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def paged(k: Tensor, v: Tensor, quantize: str | None) -> tuple[PagedKVCache, list[int]]:
    """The keys and values [B, Hkv, S, D] in pages, out of order."""
    batch, heads, length, _ = k.shape
    pages = -(-length // PAGE)
    cache = PagedKVCache.allocate(
        batch * pages,
        PAGE,
        heads,
        DIM,
        max_sequences=batch,
        max_pages_per_sequence=pages,
        dtype=k.dtype,
        quantize=quantize,
    )
    ids = cache.add(batch)
    for start in range(0, length, PAGE):  # page by page: neighbours belong to other sequences
        cache.append(k[:, :, start : start + PAGE], v[:, :, start : start + PAGE], ids)
    return cache, ids


def candidates(
    q: Tensor, k: Tensor, v: Tensor, kind: str
) -> tuple[dict[str, Callable[[], Tensor]], int]:
    """The implementations by name, and the bytes of keys and values that each reads."""
    batch, kv_heads, length, _ = k.shape
    folded = q.view(batch, kv_heads, -1, DIM)
    torch_ways: dict[str, Callable[[], Tensor]] = {
        "torch": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "torch, folded": lambda: F.scaled_dot_product_attention(folded, k, v).view(q.shape),
    }
    if kind == "plain":
        lengths = torch.full((batch,), length, dtype=torch.int32)
        ours = partial(attnkit.decode_attention, q, k, v, lengths)
        return {"attnkit": ours, **torch_ways}, 2 * k.nbytes
    cache, ids = paged(k, v, None if kind == "paged" else kind)
    width = 1 if kind in ("int8", "fp8") else k.element_size()
    return {"attnkit": lambda: cache.attend(q, ids), **torch_ways}, 2 * k.numel() * width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    print(headline(describe_machine(), describe_versions()), "\n")
    print("| cache | implementation | median us | GB/s | x torch | of the read rate |")
    print("|---|---|--:|--:|--:|--:|")
    for dtype, batch, kv_heads, kind in CASES:
        q = torch.randn(batch, HEADS, 1, DIM).to(dtype)
        k, v = (torch.randn(batch, kv_heads, options.length, DIM).to(dtype) for _ in range(2))
        ways, size = candidates(q, k, v, kind)
        bound = 0.25 if kind == "fp8" else 0.06 if kind == "int8" else 2e-2
        for name, way in ways.items():
            torch.testing.assert_close(way(), ways["torch"](), atol=bound, rtol=bound, msg=name)
        probe = read_probe()
        timed = compare(
            [*(Candidate(name, way) for name, way in ways.items()), probe.candidate()],
            rounds=options.rounds,
            clock=CLOCKS[options.clock],
        )
        rate = probe.work / timed.samples[PROBE].median
        label = f"{NAMES[dtype]} B{batch} {kv_heads} heads, {kind}"
        for name in ways:
            median = timed.samples[name].median
            read = (size if name == "attnkit" else 2 * k.nbytes) / median
            print(
                f"| {label} | {name} | {median * 1e6:.0f} | {read / 1e9:.1f} "
                f"| {timed.ratio(name, 'torch').median:.2f} | {read / rate:.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
