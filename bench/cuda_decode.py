"""One query per sequence over a cache on a GPU: microseconds, and the share of copied bytes' rate.

    python bench/cuda_decode.py [--rounds N]

Each case is compared with the float64 reference before it is timed.  Beside it, in the same rounds:
F.scaled_dot_product_attention, flash-attn and FlashInfer where they are installed, and a copy on
the device, whose rate (bytes read and written) is what bandwidth is measured in.

Calls are timed inside a CUDA graph, where one can be captured, so that no host's overhead is in
them; and each call reads another cache, so many that together they do not fit into the L2 cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnkit import _slots
from attnkit.backends import cuda, reference
from attnkit.spec import AttentionSpec, CacheArgs, TensorArgs

HEADS, DIM, PAGE = 32, 128, 16
SPEC = AttentionSpec(DIM**-0.5, None, 0, True)
CASES = [  # batch, key heads, length
    (1, 1, 32768),
    (1, 8, 8192),
    (1, 32, 8192),
    (16, 8, 2048),
    (64, 8, 8192),
    (128, 1, 4096),
]
CALLS = 20  # of one measurement


class Candidate(NamedTuple):
    """call(i) computes out [B, H, 1, D] of q over the i-th cache, and reads `size` bytes of it."""

    call: Callable[[int], Tensor]
    size: int
    error: float = 0.02  # of the largest number, that rounding explains


def captured(call: Callable[[int], object]) -> Callable[[], object]:
    """What runs call(0) to call(CALLS - 1): a graph's replay, or a loop where none is captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(3):
            call(i)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for i in range(CALLS):
                call(i)
    except RuntimeError:
        torch.cuda.synchronize()
        return lambda: [call(i) for i in range(CALLS)]
    return graph.replay


def microseconds(run: Callable[[], object]) -> float:
    """Of one of the CALLS."""
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / CALLS


def in_pages(t: Tensor, ids: Tensor) -> Tensor:
    """[B, Hkv, S, D] in the pages `ids` [B, S / PAGE], as [pages, Hkv, PAGE, D]."""
    out = torch.empty(ids.numel(), t.shape[1], PAGE, t.shape[3], device=t.device, dtype=t.dtype)
    out[ids.flatten().long()] = t.unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1)
    return out


def candidates(q: Tensor, caches: list[tuple[Tensor, Tensor]]) -> dict[str, Candidate]:
    batch, _, length, _ = caches[0][0].shape
    count, numbers = len(caches), 2 * caches[0][0].numel()
    args = TensorArgs(lengths=torch.full((batch,), length, dtype=torch.int32, device=q.device))

    def own(
        stored: list[tuple[Tensor, Tensor]], where: list[CacheArgs], splits: int = 0
    ) -> Callable[[int], Tensor]:
        return lambda i: cuda.decode(
            q, *stored[i % count], args, SPEC, where[i % count], splits
        )[0]  # fmt: skip

    plain = [CacheArgs()] * count
    ids = torch.randperm(batch * length // PAGE, device=q.device).view(batch, -1).int()
    pages = [(in_pages(k, ids), in_pages(v, ids)) for k, v in caches]
    found = {
        "attnkit": Candidate(own(caches, plain), 2 * numbers),
        "attnkit, splits fill the machine": Candidate(own(caches, plain, -1), 2 * numbers),
        f"attnkit, pages of {PAGE}": Candidate(
            own(pages, [CacheArgs(block_table=ids)] * count), 2 * numbers
        ),
        "SDPA": Candidate(
            lambda i: F.scaled_dot_product_attention(q, *caches[i % count], enable_gqa=True),
            2 * numbers,
        ),
    }
    for name, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        parts = [[_slots.quantise(t, dtype) for t in kv] for kv in caches]
        found[f"attnkit, {name}"] = Candidate(
            own(
                [(k[0], v[0]) for k, v in parts],
                [CacheArgs(k_scale=k[1], v_scale=v[1]) for k, v in parts],
            ),
            numbers + 4 * numbers // DIM,
            0.1,
        )
    slots = q.transpose(1, 2)  # [B, 1, H, D]
    by_slot = [tuple(t.transpose(1, 2).contiguous() for t in kv) for kv in caches]
    if importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_with_kvcache

        found["flash-attn"] = Candidate(
            lambda i: flash_attn_with_kvcache(
                slots, *by_slot[i % count], cache_seqlens=args.lengths, causal=True
            ).transpose(1, 2),
            2 * numbers,
        )
    if importlib.util.find_spec("flashinfer") is not None and batch == 1:
        import flashinfer

        found["FlashInfer"] = Candidate(
            lambda i: flashinfer.single_decode_with_kv_cache(
                q[0, :, 0], *(t[0] for t in by_slot[i % count])
            )[None, :, None],
            2 * numbers,
        )
    return found


def measure(batch: int, heads: int, length: int, rounds: int) -> None:
    """Print one case."""
    size = 4 * batch * heads * length * DIM  # bytes of keys and values
    cold = 4 * torch.cuda.get_device_properties(0).L2_cache_size
    count = min(max(math.ceil(cold / size), 1), CALLS)
    q = torch.randn(batch, HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16)
    shape = (batch, heads, length, DIM)
    caches = [
        tuple(torch.randn(shape, device="cuda", dtype=q.dtype) for _ in "kv") for _ in range(count)
    ]
    args = TensorArgs(lengths=torch.tensor([length], dtype=torch.int32, device="cuda"))
    truth = reference.decode(*(t[:1].double() for t in (q, *caches[0])), args, SPEC)[0]
    found = candidates(q, caches)
    for name, candidate in found.items():
        error = float((candidate.call(0)[:1].double() - truth).abs().max() / truth.abs().max())
        assert error < candidate.error, f"{name} is wrong by {error}"
    copies = [torch.empty_like(k) for k, _ in caches]
    runs = {name: captured(candidate.call) for name, candidate in found.items()}
    runs["copy"] = captured(lambda i: copies[i % count].copy_(caches[i % count][0]))
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            taken[name].append(microseconds(run))
    copied = size / statistics.median(
        taken["copy"]
    )  # of keys alone: as many bytes, for it writes them too
    print(
        f"\nbatch {batch}, {HEADS} heads on {heads}, {length} keys; {count} caches; "
        f"copy {copied / 1e3:.0f} GB/s",
        flush=True,
    )
    for name, candidate in found.items():
        time = statistics.median(taken[name])
        rate = candidate.size / time
        print(f"  {name:34} {time:9.1f} us  {rate / copied:6.1%} of the copy's rate", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if not (cuda.BUILT and torch.cuda.is_available()):
        print("nothing was measured: it takes a GPU and attnkit's CUDA extension")
        return
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}, CUDA {torch.version.cuda}")
    for case in CASES:
        measure(*case, options.rounds)


if __name__ == "__main__":
    main()
