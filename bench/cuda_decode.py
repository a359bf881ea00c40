"""One query per sequence over a cache on a GPU: microseconds, and the share of copied bytes' rate.

    python bench/cuda_decode.py [--rounds N]

Each case is compared with the float64 reference before it is timed.  Beside it, in the same rounds:
F.scaled_dot_product_attention, flash-attn and FlashInfer where they are installed, and a copy on
the device, whose rate (bytes read and written) is what bandwidth is measured in.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from attnkit.backends import cuda, reference
from attnkit.spec import AttentionSpec, TensorArgs

HEADS, DIM = 32, 128
CASES = [  # batch, key heads, length
    (1, 1, 32768),
    (1, 8, 8192),
    (1, 32, 8192),
    (16, 8, 2048),
    (64, 8, 8192),
    (128, 1, 4096),
]


def microseconds(call: Callable[[], object], warm: int = 3, repeats: int = 20) -> float:
    for _ in range(warm):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / repeats


def candidates(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """What computes out [B, H, 1, D] of q [B, H, 1, D] over k and v [B, Hkv, S, D], all of it."""
    lengths = torch.full((q.shape[0],), k.shape[2], dtype=torch.int32, device=q.device)
    args, spec = TensorArgs(lengths=lengths), AttentionSpec(DIM**-0.5, None, 0, True)
    found: dict[str, Callable[[], Tensor]] = {
        "attnkit": lambda: cuda.decode(q, k, v, args, spec)[0],
        "attnkit, splits fill the machine": lambda: cuda.decode(q, k, v, args, spec, splits=-1)[0],
        "SDPA": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    }
    by_slot = [t.transpose(1, 2).contiguous() for t in (q, k, v)]  # [B, S, H, D]
    if importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_with_kvcache

        found["flash-attn"] = lambda: flash_attn_with_kvcache(
            *by_slot, cache_seqlens=lengths, causal=True
        ).transpose(1, 2)
    if importlib.util.find_spec("flashinfer") is not None and q.shape[0] == 1:
        import flashinfer

        found["FlashInfer"] = lambda: flashinfer.single_decode_with_kv_cache(
            q[0, :, 0], by_slot[1][0], by_slot[2][0]
        )[None, :, None]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if not (cuda.BUILT and torch.cuda.is_available()):
        print("nothing was measured: it takes a GPU and attnkit's CUDA extension")
        return
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}, CUDA {torch.version.cuda}")
    for batch, heads, length in CASES:
        q = torch.randn(batch, HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(batch, heads, length, DIM, device="cuda", dtype=q.dtype) for _ in "kv")
        calls = candidates(q, k, v)
        args = TensorArgs(lengths=torch.tensor([length], dtype=torch.int32, device="cuda"))
        spec = AttentionSpec(DIM**-0.5, None, 0, True)
        truth = reference.decode(*(t[:1].double() for t in (q, k, v)), args, spec)[0]
        for name, call in calls.items():
            error = float((call()[:1].double() - truth).abs().max())
            assert error < 0.02, f"{name} is wrong by {error}"
        source = torch.empty(k.numel(), device="cuda", dtype=q.dtype)
        target = torch.empty_like(source)
        taken: dict[str, list[float]] = {name: [] for name in (*calls, "copy")}
        for _ in range(options.rounds):
            for name, call in calls.items():
                taken[name].append(microseconds(call))
            taken["copy"].append(microseconds(partial(target.copy_, source)))
        size = 2 * k.numel() * k.element_size()  # read by attention; read and written by the copy
        copied = size / statistics.median(taken["copy"])
        print(
            f"\nbatch {batch}, {HEADS} heads on {heads}, {length} keys; "
            f"copy {copied / 1e3:.0f} GB/s"
        )
        for name in calls:
            time = statistics.median(taken[name])
            print(f"  {name:34} {time:9.1f} us  {size / time / copied:6.1%} of the copy's rate")


if __name__ == "__main__":
    main()
